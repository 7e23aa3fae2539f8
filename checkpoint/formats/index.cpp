#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/formats/safetensors.h>

#include <algorithm>
#include <set>

namespace tessera::internal {

namespace {

// The first line of an index whose other lines are `body`. Any change to either shows as a difference.
std::string first_line(std::string_view body) {
  return R"({"tessera_checkpoint": 1, "xxh3": ")" + to_hex(checksum(body)) + "\",\n";
}

std::string hex_of(const std::vector<uint64_t>& checksums) {
  std::string text;
  text.reserve(checksums.size() * 16);
  for (const auto value : checksums) text += to_hex(value);
  return text;
}

std::vector<uint64_t> checksums_from_hex(const JsonView& json) {
  const auto& text = json.string();
  if (text.size() % 16 != 0 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    json.fail("is not a list of checksums");
  std::vector<uint64_t> checksums;
  for (size_t i = 0; i < text.size(); i += 16) checksums.push_back(std::stoull(text.substr(i, 16), nullptr, 16));
  return checksums;
}

Json json_of(const IndexedTensor& tensor) {
  auto chunks = Json::array();
  for (const auto& chunk : tensor.chunks) chunks.push_back(to_json(chunk));
  Json json{{"name", tensor.name},
            {"dtype", safetensors_dtype(tensor.dtype, tensor.name)},
            {"shape", tensor.sizes},
            {"layout", tensor.layout},
            {"chunks", std::move(chunks)}};
  if (!tensor.aliases.empty()) json["aliases"] = tensor.aliases;
  if (!tensor.copy.of.empty()) json["copy"] = {{"of", tensor.copy.of}, {"rank", tensor.copy.rank}};
  return json;
}

IndexedTensor tensor_from_json(const JsonView& json) {
  IndexedTensor tensor;
  tensor.name = json["name"].string();
  const JsonView named(json.json(), json.where() + " \"" + tensor.name + "\"");
  tensor.dtype = dtype_from_safetensors(named["dtype"].string(), named.where());
  tensor.sizes = named["shape"].non_negatives();
  tensor.layout = named["layout"].string();
  if (named.has("aliases")) tensor.aliases = named["aliases"].strings();
  if (named.has("copy")) tensor.copy = {named["copy"]["of"].string(), named["copy"]["rank"].non_negative()};
  for (const auto& chunk : named["chunks"].elements()) tensor.chunks.push_back(chunk_from_json(chunk));
  return tensor;
}

void check_chunk(const Index& index, const IndexedTensor& tensor, const Chunk& chunk, const std::string& where) {
  TORCH_CHECK(fits(chunk.box, tensor.sizes), where, ": a chunk lies outside the shape ", at::IntArrayRef(tensor.sizes));
  TORCH_CHECK(chunk.file < static_cast<int64_t>(index.files.size()), where, ": a chunk lies in file ", chunk.file, " of ",
              index.files.size());
  const auto& file = index.files[chunk.file];
  const auto bytes = chunk.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  TORCH_CHECK(chunk.begin >= file.data_begin && chunk.begin <= file.bytes && bytes <= file.bytes - chunk.begin, where, ": chunk ",
              to_string(chunk.box), " lies outside the data of ", file.name);
  if (!index.has_checksums) return;
  TORCH_CHECK(static_cast<int64_t>(chunk.checksums.size()) == block_count(bytes, index.block_bytes), where, ": chunk ",
              to_string(chunk.box), " has ", chunk.checksums.size(), " checksums for ", block_count(bytes, index.block_bytes),
              " blocks");
}

void check_tensor(const Index& index, IndexedTensor& tensor, const std::string& source) {
  const auto where = source + ": tensor \"" + tensor.name + "\"";
  TORCH_CHECK(checked_bytes(tensor.sizes, tensor.dtype).has_value(), where, ": the shape ", at::IntArrayRef(tensor.sizes),
              " is too large");
  const auto numel = whole(tensor.sizes).numel();
  int64_t covered = 0;
  for (const auto& chunk : tensor.chunks) {
    check_chunk(index, tensor, chunk, where);
    covered += chunk.box.numel();
    TORCH_CHECK(covered <= numel, where, ": its chunks overlap");
  }
  TORCH_CHECK(covered == numel, where, ": its chunks hold ", covered, " of ", numel, " elements");
  auto& chunks = tensor.chunks;
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.box.offsets < b.box.offsets; });
  std::vector<const Box*> boxes;
  for (const auto& chunk : chunks) boxes.push_back(&chunk.box);
  TORCH_CHECK(!find_overlap(boxes), where, ": its chunks overlap");
}

void check_names(const Index& index, const std::string& source) {
  std::set<std::string> names;
  const auto claim = [&](const std::string& name) {
    TORCH_CHECK(names.insert(name).second, source, ": the name \"", name, "\" appears twice");
  };
  for (const auto& tensor : index.tensors) {
    claim(tensor.name);
    for (const auto& alias : tensor.aliases) claim(alias);
  }
  for (const auto& [name, value] : index.values) claim(name);
}

} // namespace

SavedState Index::contents() const {
  SavedState contents;
  for (const auto& tensor : tensors) {
    if (tensor.copy.of.empty()) contents.tensors.emplace(tensor.name, SavedState::Tensor{tensor.dtype, tensor.sizes});
  }
  contents.values.insert(values.begin(), values.end());
  return contents;
}

Json to_json(const Chunk& chunk) {
  return {{"file", chunk.file},
          {"offsets", chunk.box.offsets},
          {"sizes", chunk.box.sizes},
          {"begin", chunk.begin},
          {"xxh3", hex_of(chunk.checksums)}};
}

Chunk chunk_from_json(const JsonView& json) {
  return {{json["offsets"].non_negatives(), json["sizes"].non_negatives()},
          json["file"].non_negative(),
          json["begin"].non_negative(),
          checksums_from_hex(json["xxh3"])};
}

Json to_json(const IndexedFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"data_begin", file.data_begin}, {"xxh3", to_hex(file.header_checksum)}};
}

IndexedFile file_from_json(const JsonView& json) {
  IndexedFile file{json["name"].string(), json["bytes"].non_negative(), json["data_begin"].non_negative()};
  if (file.name.empty() || file.name.find('/') != std::string::npos || file.name == "." || file.name == "..")
    json["name"].fail("is not a file name");
  if (file.data_begin < 8 || file.data_begin > file.bytes) json["data_begin"].fail("lies outside the file");
  const auto checksums = checksums_from_hex(json["xxh3"]);
  if (checksums.size() != 1) json["xxh3"].fail("is not one checksum");
  file.header_checksum = checksums[0];
  return file;
}

std::string encode_index(const Index& index) {
  auto files = Json::array(), tensors = Json::array(), values = Json::array();
  for (const auto& file : index.files) files.push_back(to_json(file));
  for (const auto& tensor : index.tensors) tensors.push_back(json_of(tensor));
  for (const auto& [name, value] : index.values) values.push_back({{"name", name}, {"value", to_json(value)}});
  const Json head{{"saved_at", index.saved_at}, {"world_size", index.world_size}, {"block_bytes", index.block_bytes}};
  // One line an item: people read it, and a diff of two indexes shows what changed.
  const auto lines = [](const Json& array) {
    std::string text = "[";
    for (const auto& item : array) text += (text.size() > 1 ? ",\n  " : "\n  ") + dump_json(item, kIndexName);
    return text + "]";
  };
  auto body = dump_json(head, kIndexName).substr(1);
  body.pop_back();
  body += ",\n\"files\": " + lines(files) + ",\n\"tensors\": " + lines(tensors) + ",\n\"values\": " + lines(values) + "}\n";
  auto text = first_line(body) + body;
  TORCH_CHECK(static_cast<int64_t>(text.size()) <= kMaxIndexBytes, "checkpoint: the index would have ", text.size(),
              " bytes, more than the ", kMaxIndexBytes, " it may have; save the state as several checkpoints");
  return text;
}

Index parse_index(std::string_view text, const std::string& source) {
  const auto newline = text.find('\n');
  TORCH_CHECK(newline != std::string_view::npos && text.starts_with(kIndexStart), source, ": not the index of a checkpoint");
  TORCH_CHECK(text.starts_with(R"({"tessera_checkpoint": 1,)"), source,
              ": a version of the format that this library does not read, or damaged");
  TORCH_CHECK(text.substr(0, newline + 1) == first_line(text.substr(newline + 1)), source,
              ": damaged: its text does not have the checksum of its first line");
  const auto json = parse_json(text, source);
  const JsonView view(json, source + ": index");
  Index index{view["saved_at"].non_negative(),
              view["world_size"].non_negative(),
              view["block_bytes"].non_negative(),
              {},
              {},
              {},
              checksum(text)};
  if (index.block_bytes < 4096 || index.block_bytes > (1 << 30)) view["block_bytes"].fail("is not between 4 KiB and 1 GiB");
  for (const auto& file : view["files"].elements()) index.files.push_back(file_from_json(file));
  for (const auto& tensor : view["tensors"].elements()) index.tensors.push_back(tensor_from_json(tensor));
  for (const auto& value : view["values"].elements())
    index.values.emplace_back(value["name"].string(), state_value_from_json(value["value"]));
  validate(index, source);
  return index;
}

void validate(Index& index, const std::string& source) {
  check_names(index, source);
  for (auto& tensor : index.tensors) check_tensor(index, tensor, source);
}

bool begins_as_index(const ByteSource& file) {
  std::string start(std::min<size_t>(std::string_view(kIndexStart).size(), file.size()), '\0');
  file.read_at(start.data(), start.size(), 0);
  return start == kIndexStart;
}

Index read_index(const std::filesystem::path& folder) {
  const auto path = folder / kIndexName;
  TORCH_CHECK(std::filesystem::is_directory(folder), folder.string(), " is not a checkpoint: no such folder");
  TORCH_CHECK(std::filesystem::exists(path), folder.string(), " is not a complete checkpoint: it has no ", kIndexName);
  TORCH_CHECK(begins_as_index(File::open(path)), path.string(),
              ": not the index of a checkpoint"); // before a large file of others is read
  return parse_index(read_file(path, kMaxIndexBytes), path.string());
}

} // namespace tessera::internal
