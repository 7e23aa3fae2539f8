#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/folder_names.h>
#include <tessera/checkpoint/formats/distcp.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/formats/torch_archive.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

namespace tessera::internal {

namespace {

constexpr int64_t kMaxHuggingFaceIndexBytes = int64_t{1} << 30;

// Where each tensor's part starts; a file without sharding information holds whole tensors.
std::map<std::string, std::vector<int64_t>> offsets_in(const SafetensorsHeader& header, const std::string& source) {
  std::map<std::string, std::vector<int64_t>> offsets;
  const auto info = header.metadata.find("DCP_SHARDING_INFO");
  if (info == header.metadata.end()) return offsets;
  const auto json = parse_json(info->second, source + ": DCP_SHARDING_INFO");
  for (const auto& [name, part] : JsonView(json, source + ": DCP_SHARDING_INFO").fields()) {
    offsets[name] = part["saved_offsets"].non_negatives();
  }
  return offsets;
}

// Tensors put together from the parts that the files hold.
class Collector {
 public:
  explicit Collector(Index& index) : index_(index) {}

  void add_file(const File& file, const std::string& name) {
    const auto source = file.path().string();
    const auto prefix = read_safetensors_prefix(file);
    const auto header = parse_safetensors(prefix, file.size(), source);
    // A file of ours without the index beside it is a part of a torn checkpoint.
    TORCH_CHECK(!header.metadata.count(kOwnKey), file.path().parent_path().string(), " is not a complete checkpoint: it has no ",
                kIndexName);
    const auto offsets = offsets_in(header, source);
    for (const auto& part : header.tensors) {
      Box box = whole(part.sizes);
      if (const auto found = offsets.find(part.name); found != offsets.end()) box.offsets = found->second;
      TORCH_CHECK(box.offsets.size() == box.sizes.size(), source, ": tensor \"", part.name, "\" has ", box.sizes.size(),
                  " dims and ", box.offsets.size(), " saved_offsets");
      add_part(part, std::move(box), source);
    }
    index_.files.push_back({name, file.size(), header.data_begin, checksum(prefix)});
    index_.checksum = checksum(to_hex(index_.checksum) + to_hex(index_.files.back().header_checksum));
  }

 private:
  void add_part(const SafetensorsTensor& part, Box box, const std::string& source) {
    const auto [found, is_new] = positions_.emplace(part.name, index_.tensors.size());
    if (is_new)
      index_.tensors.push_back({part.name, {}, part.dtype, std::vector<int64_t>(box.sizes.size(), 0), "safetensors", {}});
    auto& tensor = index_.tensors[found->second];
    TORCH_CHECK(tensor.dtype == part.dtype && tensor.sizes.size() == box.sizes.size(), source, ": tensor \"", part.name,
                "\" has another dtype or number of dims than in the files before");
    for (size_t d = 0; d < box.sizes.size(); ++d) {
      int64_t end = 0;
      TORCH_CHECK(!__builtin_add_overflow(box.offsets[d], box.sizes[d], &end), source, ": tensor \"", part.name,
                  "\" has saved_offsets that are too large");
      tensor.sizes[d] = std::max(tensor.sizes[d], end);
    }
    tensor.chunks.push_back({std::move(box), static_cast<int64_t>(index_.files.size()), part.begin, {}});
  }

  Index& index_;
  std::unordered_map<std::string, size_t> positions_;
};

// The files that a Hugging Face index names, all of whose tensors must be there.
Index index_of_hugging_face(const std::filesystem::path& folder) {
  const auto path = folder / kHuggingFaceIndex;
  const auto json = parse_json(read_file(path, kMaxHuggingFaceIndexBytes), path.string());
  std::map<std::string, std::string> file_of;
  std::set<std::string> files;
  for (const auto& [tensor, file] : JsonView(json, path.string() + ": index")["weight_map"].fields()) {
    const auto& name = file.string();
    if (name.find('/') != std::string::npos || !name.ends_with(".safetensors"))
      file.fail("is not the name of a safetensors file");
    file_of[tensor] = name;
    files.insert(name);
  }
  auto index = index_of_safetensors(folder, {files.begin(), files.end()});
  for (const auto& tensor : index.tensors) {
    const auto listed = file_of.extract(tensor.name);
    TORCH_CHECK(!listed.empty(), path.string(), ": tensor \"", tensor.name, "\" of ", index.files[tensor.chunks[0].file].name,
                " is not listed");
    TORCH_CHECK(index.files[tensor.chunks[0].file].name == listed.mapped(), path.string(), ": tensor \"", tensor.name,
                "\" is listed in ", listed.mapped(), " and lies in ", index.files[tensor.chunks[0].file].name);
  }
  TORCH_CHECK(file_of.empty(), path.string(), ": tensor \"", file_of.begin()->first, "\" is not in ", file_of.begin()->second);
  return index;
}

// A file of another name may have been anything before it was cut short.
void check_is_known(const std::filesystem::path& path) {
  if (path.extension() == ".safetensors") return;
  const auto file = File::open(path);
  constexpr int64_t kLength = 8; // of the header, before it
  char start = 0;
  if (file.size() > kLength) file.read_at(&start, 1, kLength);
  TORCH_CHECK(start == '{', path.string(), " is no checkpoint, or is cut short: its ", file.size(),
              " bytes begin neither as a zip archive of torch.save nor as a safetensors file. Copy it again, or save it again");
}

} // namespace

std::vector<std::string> safetensors_files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Index index_of_safetensors(const std::filesystem::path& folder, const std::vector<std::string>& files) {
  Index index;
  index.has_checksums = false;
  Collector collector(index);
  for (const auto& name : files) collector.add_file(File::open(folder / name), name);
  validate(index, folder.string());
  return index;
}

Opened open_checkpoint(const std::filesystem::path& path) {
  TORCH_CHECK(std::filesystem::exists(path), path.string(), " is not a checkpoint: no such folder");
  const auto resolved = std::filesystem::canonical(path);
  if (!std::filesystem::is_directory(resolved)) {
    if (is_torch_file(resolved)) return {resolved.parent_path(), index_of_torch_file(resolved)};
    check_is_known(resolved);
    return {resolved.parent_path(), index_of_safetensors(resolved.parent_path(), {resolved.filename().string()})};
  }
  if (std::filesystem::exists(resolved / kIndexName)) return {resolved, read_index(resolved)};
  if (std::filesystem::exists(resolved / kHuggingFaceFile)) return {resolved, index_of_safetensors(resolved, {kHuggingFaceFile})};
  if (std::filesystem::exists(resolved / kHuggingFaceIndex)) return {resolved, index_of_hugging_face(resolved)};
  if (std::filesystem::exists(resolved / kDistcpMetadata)) return {resolved, index_of_distcp(resolved)};
  const auto files = safetensors_files_in(resolved);
  TORCH_CHECK(!files.empty(), path.string(), " is not a complete checkpoint: it has no ", kIndexName, " and no safetensors files",
              std::filesystem::exists(resolved / kLatestName) ? "; take a checkpoint in it, such as its latest" : "");
  return {resolved, index_of_safetensors(resolved, files)};
}

Opened open_checkpoint(const checkpoint::Storage& storage, const std::string& name) {
  const CheckpointSource source(storage, name);
  TORCH_CHECK(storage.size(name + "/" + kIndexName), name, " is not a complete checkpoint: the storage has no ", name, "/",
              kIndexName);
  const auto index = source.open(kIndexName);
  return {source, parse_index(read_all(*index, kMaxIndexBytes), index->name())};
}

} // namespace tessera::internal
