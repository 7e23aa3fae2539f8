#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/export/export.h>
#include <tessera/checkpoint/export/formats.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/hugging_face.h>

#include <algorithm>
#include <map>

namespace tessera::internal {

namespace {

struct WholeFile {
  std::string name;
  SafetensorsHeader header;
  std::string prefix; // the bytes before the data
};

struct Layout {
  std::vector<WholeFile> files;
  std::vector<std::pair<size_t, size_t>> places; // of each tensor of the plan: its file, and its position in that one's header
};

std::string numbered(const std::string& name, size_t file, size_t files) {
  const auto stem = std::filesystem::path(name).stem().string();
  return files == 1 ? name : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, file + 1, files);
}

// Tensors in the plan's order, into as few files as the limit allows.
Layout lay_out(const SavePlan& plan, const checkpoint::HuggingFaceOptions& options) {
  Layout layout;
  int64_t bytes = 0;
  for (const auto& [what, parts] : plan.tensors) {
    const auto dtype = options.dtype && c10::isFloatingType(what.dtype) ? *options.dtype : what.dtype;
    const auto size = whole(what.sizes).numel() * static_cast<int64_t>(c10::elementSize(dtype));
    if (layout.files.empty() || (bytes > 0 && size > 0 && bytes + size > options.max_file_bytes)) {
      layout.files.emplace_back();
      bytes = 0;
    }
    bytes += size;
    auto& tensors = layout.files.back().header.tensors;
    layout.places.emplace_back(layout.files.size() - 1, tensors.size());
    tensors.push_back({what.name, dtype, what.sizes});
  }
  if (layout.files.empty()) layout.files.emplace_back();
  for (size_t f = 0; f < layout.files.size(); ++f) {
    auto& [name, header, prefix] = layout.files[f];
    name = numbered(options.file_name, f, layout.files.size());
    header.metadata = {{"format", "pt"}};
    prefix = encode_safetensors(header, name);
  }
  return layout;
}

void create_files(const Layout& layout, const std::filesystem::path& folder) {
  for (const auto& [name, header, prefix] : layout.files) {
    auto file = File::create(folder / name);
    file.reserve(header.tensors.empty() ? header.data_begin : header.tensors.back().end);
    file.write_at(prefix.data(), prefix.size(), 0);
    file.sync_and_close();
  }
}

void write_into_files(const Layout& layout, const std::vector<OwnedPart>& parts, const std::filesystem::path& folder) {
  std::map<size_t, File> files;
  for (const auto& part : parts) {
    const auto& [position, index] = layout.places[static_cast<size_t>(part.tensor)];
    const auto& [name, header, prefix] = layout.files[position];
    if (!files.count(position)) files.emplace(position, File::open_to_write(folder / name));
    auto& file = files.at(position);
    const auto& tensor = header.tensors[index];
    write_into_whole(file, part, tensor.dtype, tensor.begin);
  }
  for (auto& [position, file] : files) file.sync_and_close();
}

void write_weight_map(const Layout& layout, const std::filesystem::path& path) {
  if (layout.files.size() == 1) return;
  Json map = Json::object();
  int64_t total = 0;
  for (const auto& [name, header, prefix] : layout.files) {
    for (const auto& tensor : header.tensors) map[tensor.name] = name;
    total += header.tensors.back().end - header.data_begin;
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
  write_file(path, index.dump(2) + "\n");
}

// Of a tied tensor the first name is written.
SavePlan names_of(SavePlan plan, const NameMap& rename) {
  for (auto& [what, parts] : plan.tensors) what.aliases.clear();
  return renamed(std::move(plan), rename);
}

bool is_control(char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }

void check(const checkpoint::HuggingFaceOptions& options) {
  TORCH_CHECK(options.max_file_bytes > 0, "max_file_bytes is ", options.max_file_bytes);
  TORCH_CHECK(!options.dtype || c10::isFloatingType(*options.dtype), "HuggingFaceOptions::dtype is ",
              c10::toString(*options.dtype), ", which is no floating-point dtype");
  const std::filesystem::path name = options.file_name;
  const bool is_name = name.extension() == ".safetensors" && name.filename() == name && !options.file_name.starts_with('.') &&
                       std::ranges::none_of(options.file_name, is_control);
  dump_json(options.file_name, "HuggingFaceOptions::file_name"); // text that is not UTF-8 is an error
  TORCH_CHECK(is_name, "HuggingFaceOptions::file_name is \"", options.file_name, "\", which is no name of a safetensors file");
}

} // namespace

void write_hugging_face(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts,
                        const checkpoint::HuggingFaceOptions& options) {
  Layout layout;
  session.all_agree("lay out", [&] {
    check(options); // also for a conversion
    layout = lay_out(names_of(plan, options.rename), options);
    if (session.ranks().rank() == 0) create_files(layout, session.folder());
    std::string all;
    for (const auto& file : layout.files) all += file.name + file.prefix;
    return all;
  });
  session.all("save", [&] { write_into_files(layout, parts, session.folder()); });
  session.commit([&] { write_weight_map(layout, session.folder() / (options.file_name + ".index.json")); });
}

} // namespace tessera::internal

namespace tessera::checkpoint {

void save_hugging_face(const StateDict& state, const std::filesystem::path& dir, const HuggingFaceOptions& options) {
  const auto check = [&](const internal::Snapshot& snapshot) {
    internal::check(options);
    const auto& values = snapshot.state.values;
    TORCH_CHECK(values.empty(), "a Hugging Face folder holds no values, and the state has \"", values.front().first,
                "\"; save state_dict(module), or leave it out by `filter`");
    return std::string();
  };
  internal::Export to(state, dir, internal::ExportOptions(options), {internal::Staged::kWeights, options.file_name},
                      "a Hugging Face folder", check);
  internal::write_hugging_face(to.session(), to.plan(), to.parts(), options);
}

} // namespace tessera::checkpoint
