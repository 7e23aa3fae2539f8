// Looks at checkpoints, checks them, compares them and converts them. Reads all formats that tessera::checkpoint::load reads.
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/base/text_table.h>
#include <tessera/checkpoint/export/convert.h>
#include <tessera/checkpoint/formats/reader.h>
#include <tessera/checkpoint/formats/safetensors.h>

#include <ctime>
#include <map>
#include <optional>
#include <string_view>

#include "progress_bar.h"

ABSL_FLAG(std::string, to, "tessera",
          "convert: the format to write: tessera, hugging-face or dcp (PyTorch's HuggingFaceStorageWriter)");
ABSL_FLAG(std::vector<std::string>, exclude, {},
          "convert: leave out names that start with one of these, separated by commas (for example optimizer.)");
ABSL_FLAG(std::string, dtype, "",
          "convert: dtype of floating-point tensors in a Hugging Face folder, such as BF16; default: as they are");
ABSL_FLAG(int64_t, max_file_bytes, 5'000'000'000, "convert: largest file of a Hugging Face folder");
ABSL_FLAG(bool, overwrite, false, "convert: replace an existing target");
ABSL_FLAG(bool, verify, true, "convert: check what is read against its checksums");

namespace {

using tessera::internal::Opened;

constexpr const char* kUsage = R"(tessera-checkpoint COMMAND PATH...

  inspect PATH     what the checkpoint holds: tensors with dtype, shape, layout and size, and values
  verify PATH      reads every byte and compares it with its checksum; status 1 when something is wrong
  diff PATH PATH   how two checkpoints differ, whatever their formats; status 1 when they do
  convert FROM TO  writes FROM in another format: --to=tessera, hugging-face or dcp; --exclude, --dtype, --overwrite

PATH is a checkpoint of Tessera's, a Hugging Face folder, a folder of torch.distributed.checkpoint, a safetensors file, or a .pt
file of torch.save or torch::save.)";

std::string join(const std::vector<int64_t>& sizes) { return "[" + absl::StrJoin(sizes, ", ") + "]"; }

// One line of text. Names may hold what a terminal takes for commands.
std::string visible(std::string_view text) {
  std::string shown;
  for (const char c : text) {
    const bool is_control = static_cast<unsigned char>(c) < ' ' || c == '\x7f';
    shown += c == '\n' ? "\\n" : is_control ? fmt::format("\\x{:02x}", static_cast<unsigned>(c)) : std::string(1, c);
  }
  return shown;
}

std::string time_of(int64_t microseconds) {
  const auto seconds = static_cast<std::time_t>(microseconds / 1'000'000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::string text(32, '\0');
  text.resize(std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &utc));
  return text;
}

void inspect(const Opened& opened) {
  const auto& index = opened.index;
  int64_t file_bytes = 0;
  for (const auto& file : index.files) file_bytes += file.bytes;
  fmt::print("{}\n", visible(opened.source.name()));
  if (index.saved_at > 0) fmt::print("saved {} by {} ranks\n", time_of(index.saved_at), index.world_size);
  fmt::print("{} tensors, {}; {} values; {} files, {}; {}\n", index.tensors.size(),
             human_bytes(tessera::internal::data_bytes(index)), index.values.size(), index.files.size(), human_bytes(file_bytes),
             index.has_checksums ? "with checksums" : "without checksums");
  std::vector<tessera::internal::TextRow> rows{{"tensor", "dtype", "shape", "layout", "parts", "size"}};
  for (const auto& tensor : index.tensors) {
    auto name = tensor.name;
    for (const auto& alias : tensor.aliases) name += " = " + alias;
    const auto bytes = tessera::internal::whole(tensor.sizes).numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    rows.push_back({visible(name), tessera::internal::safetensors_dtype(tensor.dtype, name), join(tensor.sizes),
                    visible(tensor.layout), std::to_string(tensor.chunks.size()), human_bytes(bytes)});
  }
  if (rows.size() > 1) fmt::print("\n{}", tessera::internal::text_table(rows, {"parts", "size"}));
  rows = {{"value", "type", ""}};
  for (const auto& [name, value] : index.values) {
    const auto json = tessera::internal::to_json(value);
    rows.push_back({visible(name), json.begin().key(), visible(tessera::internal::to_text(json.begin().value()))});
  }
  if (rows.size() > 1) fmt::print("\n{}", tessera::internal::text_table(rows));
}

int report(const std::vector<std::string>& findings, const std::string& none) {
  for (const auto& finding : findings) fmt::print("{}\n", visible(finding));
  if (findings.empty()) fmt::print("{}\n", none);
  return findings.empty() ? 0 : 1;
}

int verify(const std::string& path) {
  std::optional<Opened> opened;
  try {
    opened = tessera::internal::open_checkpoint(path);
  } catch (const std::exception& error) { // also those of std::filesystem
    return report({tessera::internal::error_text(error)}, "");
  }
  const auto& index = opened->index;
  std::vector<std::string> findings;
  {
    ProgressBar bar("verify", tessera::internal::data_bytes(index));
    findings =
        tessera::internal::Reader(opened->source, index, index.has_checksums).verify_all([&](int64_t bytes) { bar.add(bytes); });
  }
  return report(findings,
                index.has_checksums ? "whole: every byte has its checksum" : "the structure is sound; there are no checksums");
}

int diff(const std::string& first, const std::string& second) {
  const auto a = tessera::internal::open_checkpoint(first), b = tessera::internal::open_checkpoint(second);
  std::vector<std::string> findings;
  {
    ProgressBar bar("diff", tessera::internal::data_bytes(a.index));
    findings = tessera::internal::differences(a, b, [&](int64_t bytes) { bar.add(bytes); });
  }
  return report(findings, "the same");
}

int convert(const std::string& from, const std::string& to) {
  const std::map<std::string, tessera::internal::Format> formats{{"tessera", tessera::internal::Format::kTessera},
                                                                 {"hugging-face", tessera::internal::Format::kHuggingFace},
                                                                 {"dcp", tessera::internal::Format::kDistributed}};
  const auto format = formats.find(absl::GetFlag(FLAGS_to));
  TORCH_CHECK(format != formats.end(), "--to=", absl::GetFlag(FLAGS_to), ": not one of tessera, hugging-face, dcp");
  const auto opened = tessera::internal::open_checkpoint(from);
  tessera::internal::ConvertOptions options;
  options.format = format->second;
  options.exclude = absl::GetFlag(FLAGS_exclude);
  options.verify = absl::GetFlag(FLAGS_verify);
  options.hugging_face.overwrite = absl::GetFlag(FLAGS_overwrite);
  options.hugging_face.max_file_bytes = absl::GetFlag(FLAGS_max_file_bytes);
  if (const auto dtype = absl::GetFlag(FLAGS_dtype); !dtype.empty()) {
    TORCH_CHECK(format->second == tessera::internal::Format::kHuggingFace, "--dtype needs --to=hugging-face");
    options.hugging_face.dtype = tessera::internal::dtype_from_safetensors(dtype, "--dtype");
  }
  std::vector<std::string> left_out;
  {
    ProgressBar bar("convert", tessera::internal::data_bytes(opened.index));
    options.progress = [&](int64_t bytes) { bar.add(bytes); };
    left_out = tessera::internal::convert(opened, to, options);
  }
  fmt::print("wrote {}\n", visible(to));
  if (!left_out.empty())
    fmt::print("left out, because the format holds no values, and a tensor once: {}\n", visible(absl::StrJoin(left_out, ", ")));
  return 0;
}

int run(const std::vector<char*>& arguments) {
  const std::vector<std::string> words(arguments.begin() + 1, arguments.end());
  const auto is = [&](const char* command, size_t paths) {
    return !words.empty() && words[0] == command && words.size() == paths + 1;
  };
  if (is("inspect", 1)) return inspect(tessera::internal::open_checkpoint(words[1])), 0;
  if (is("verify", 1)) return verify(words[1]);
  if (is("diff", 2)) return diff(words[1], words[2]);
  if (is("convert", 2)) return convert(words[1], words[2]);
  if (!words.empty()) fmt::print(stderr, "tessera-checkpoint: no command '{}' with {} paths\n\n", words[0], words.size() - 1);
  fmt::print(stderr, "{}\n", kUsage);
  return 2;
}

} // namespace

int main(int argc, char** argv) {
  try {
    absl::SetProgramUsageMessage(kUsage);
    absl::FlagsUsageConfig config;
    config.contains_help_flags = [](absl::string_view file) {
      return file.find("tessera_checkpoint") != absl::string_view::npos;
    };
    absl::SetFlagsUsageConfig(config);
    return run(absl::ParseCommandLine(argc, argv));
  } catch (const std::exception& error) {
    const std::vector<std::string> lines = absl::StrSplit(tessera::internal::error_text(error), '\n');
    const auto append = [](std::string* out, const std::string& line) { *out += visible(line); };
    fmt::print(stderr, "tessera-checkpoint: {}\n", absl::StrJoin(lines, "\n", append));
  }
  return 2;
}
