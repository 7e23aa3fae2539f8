#include <c10/util/Exception.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/formats.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/runs.h>
#include <tessera/checkpoint/safetensors.h>

#include <algorithm>
#include <map>
#include <set>

namespace tessera::checkpoint {

namespace {

struct WholeFile {
  std::string name;
  SafetensorsHeader header;
  std::string prefix; // the bytes before the data
};

// Where a tensor of the plan lies.
struct Place {
  size_t file = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t begin = 0;
};

struct Layout {
  std::vector<WholeFile> files;
  std::vector<Place> places; // one a tensor of the plan
};

std::string numbered(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  const auto padded = [](size_t n) {
    return std::string(5 - std::min<size_t>(5, std::to_string(n).size()), '0') + std::to_string(n);
  };
  return "model-" + padded(file + 1) + "-of-" + padded(files) + ".safetensors";
}

// Tensors in the plan's order, into as few files as the limit allows.
Layout lay_out(const SavePlan& plan, const HuggingFaceOptions& options) {
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
    layout.places.push_back({layout.files.size() - 1, dtype});
    layout.files.back().header.tensors.push_back({what.name, dtype, what.sizes});
  }
  if (layout.files.empty()) layout.files.emplace_back();
  size_t next = 0;
  for (size_t f = 0; f < layout.files.size(); ++f) {
    auto& [name, header, prefix] = layout.files[f];
    name = numbered(f, layout.files.size());
    header.metadata = {{"format", "pt"}};
    prefix = encode_safetensors(header, name);
    for (const auto& tensor : header.tensors) layout.places[next++].begin = tensor.begin;
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
    const auto& place = layout.places[static_cast<size_t>(part.tensor)];
    if (!files.count(place.file)) files.emplace(place.file, File::open_to_write(folder / layout.files[place.file].name));
    auto& file = files.at(place.file);
    const auto data = part.data().resolve_conj().resolve_neg().to(at::kCPU, place.dtype).contiguous();
    if (data.numel() == 0) continue;
    const auto* bytes = static_cast<const char*>(data.const_data_ptr());
    const auto item = static_cast<int64_t>(data.element_size());
    for_each_run(part.box, part.box, whole(part.what->sizes), [&](int64_t from, int64_t to, int64_t length) {
      file.write_at(bytes + from * item, static_cast<size_t>(length * item), place.begin + to * item);
    });
  }
  for (auto& [position, file] : files) file.sync_and_close();
}

void write_weight_map(const Layout& layout, const std::filesystem::path& folder) {
  if (layout.files.size() == 1) return;
  Json map = Json::object();
  int64_t total = 0;
  for (const auto& [name, header, prefix] : layout.files) {
    for (const auto& tensor : header.tensors) map[tensor.name] = name;
    total += header.tensors.back().end - header.data_begin;
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
  auto file = File::create(folder / "model.safetensors.index.json");
  file.write(index.dump(2) + "\n");
  file.sync_and_close();
}

} // namespace

void write_hugging_face(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts,
                        const HuggingFaceOptions& options) {
  Layout layout;
  session.all("lay out", [&] {
    TORCH_CHECK(!options.dtype || c10::isFloatingType(*options.dtype), "HuggingFaceOptions::dtype is ",
                c10::toString(*options.dtype), ", which is no floating-point dtype");
    layout = lay_out(plan, options);
    if (session.ranks().rank() == 0) create_files(layout, session.folder());
    return std::string();
  });
  session.all("save", [&] {
    write_into_files(layout, parts, session.folder());
    return std::string();
  });
  session.commit([&] { write_weight_map(layout, session.folder()); });
}

void save_hugging_face(const StateDict& state, const std::filesystem::path& dir, const HuggingFaceOptions& options) {
  TORCH_CHECK(options.max_file_bytes > 0, "checkpoint: max_file_bytes is ", options.max_file_bytes);
  const Ranks ranks;
  Snapshot snapshot;
  ranks.all("start to save " + dir.string(), [&] {
    snapshot = snapshot_of(state);
    for (const auto& [name, value] : snapshot.state.values) {
      TORCH_CHECK(false, "a Hugging Face folder holds no values, and the state has \"", name, "\"; save state_dict(module)");
    }
    return std::string();
  });
  SaveOptions save_options;
  save_options.overwrite = options.overwrite;
  save_options.update_latest = false;
  SaveSession session(ranks, dir, save_options);
  Planner planner;
  const auto& plan = planner.plan(ranks, snapshot.state);
  write_hugging_face(session, plan, parts_of(plan, ranks.rank(), snapshot), options);
}

} // namespace tessera::checkpoint
