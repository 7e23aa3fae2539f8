#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/dtensor/layout/box.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace tessera::internal {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000; // the limit of the reference implementation
constexpr const char* kMetadataKey = "__metadata__";

constexpr std::array<std::pair<const char*, at::ScalarType>, 19> kDtypes{{
    {"BOOL", at::kBool},
    {"C64", at::kComplexFloat},
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
}};

SafetensorsTensor parse_tensor(const std::string& name, const JsonView& json, int64_t data_begin, int64_t file_bytes) {
  SafetensorsTensor tensor{name, dtype_from_safetensors(json["dtype"].string(), json.where()), json["shape"].non_negatives()};
  const auto range = json["data_offsets"].non_negatives();
  if (range.size() != 2 || range[0] > range[1]) json.fail("has data_offsets that are no range");
  if (range[1] > file_bytes - data_begin) {
    json.fail("ends at byte " + std::to_string(range[1]) + " of the data, which has " + std::to_string(file_bytes - data_begin));
  }
  if (checked_bytes(tensor.sizes, tensor.dtype) != range[1] - range[0])
    json.fail("has data of another size than its shape and dtype");
  tensor.begin = data_begin + range[0];
  tensor.end = data_begin + range[1];
  return tensor;
}

} // namespace

std::string safetensors_dtype(at::ScalarType dtype, const std::string& what) {
  for (const auto& [name, candidate] : kDtypes) {
    if (candidate == dtype) return name;
  }
  TORCH_CHECK(false, what, ": the safetensors format has no dtype ", c10::toString(dtype));
}

at::ScalarType dtype_from_safetensors(const std::string& name, const std::string& what) {
  for (const auto& [candidate, dtype] : kDtypes) {
    if (candidate == name) return dtype;
  }
  TORCH_CHECK(false, what, " has the unknown dtype \"", name, "\"");
}

std::string encode_safetensors(SafetensorsHeader& header, const std::string& source) {
  Json json = Json::object();
  if (!header.metadata.empty()) json[kMetadataKey] = header.metadata;
  int64_t position = 0;
  for (auto& tensor : header.tensors) {
    TORCH_CHECK(!json.contains(tensor.name), source, ": tensor name \"", tensor.name, "\" is reserved or appears twice");
    tensor.begin = position;
    position += checked_bytes(tensor.sizes, tensor.dtype).value();
    tensor.end = position;
    json[tensor.name] = {{"dtype", safetensors_dtype(tensor.dtype, tensor.name)},
                         {"shape", tensor.sizes},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  auto text = dump_json(json, source);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK(static_cast<int64_t>(text.size()) <= kMaxHeaderBytes, source, ": a header of ", text.size(), " bytes is too long");
  header.data_begin = kLengthBytes + static_cast<int64_t>(text.size());
  for (auto& tensor : header.tensors) {
    tensor.begin += header.data_begin;
    tensor.end += header.data_begin;
  }
  const auto length = static_cast<uint64_t>(text.size());
  std::string prefix(kLengthBytes, '\0');
  std::memcpy(prefix.data(), &length, kLengthBytes);
  return prefix + text;
}

std::string read_safetensors_prefix(const ByteSource& file) {
  const auto path = file.name();
  TORCH_CHECK(file.size() >= kLengthBytes, path, ": ", file.size(), " bytes are too few for a safetensors file");
  uint64_t length = 0;
  file.read_at(&length, kLengthBytes, 0);
  TORCH_CHECK(length <= static_cast<uint64_t>(file.size() - kLengthBytes), path, ": a header of ", length, " bytes in a file of ",
              file.size());
  TORCH_CHECK(length <= static_cast<uint64_t>(kMaxHeaderBytes), path, ": a header of ", length, " bytes is too long");
  std::string prefix(kLengthBytes + length, '\0');
  file.read_at(prefix.data(), prefix.size(), 0);
  return prefix;
}

SafetensorsHeader parse_safetensors(std::string_view prefix, int64_t file_bytes, const std::string& source) {
  SafetensorsHeader header;
  header.data_begin = static_cast<int64_t>(prefix.size());
  const auto text = prefix.substr(kLengthBytes);
  TORCH_CHECK(text.starts_with('{'), source, ": the header does not start with '{'");
  const auto json = parse_json(text, source);
  for (const auto& [name, value] : JsonView(json, source + ": header").fields()) {
    if (name == kMetadataKey) {
      for (const auto& [key, entry] : value.fields()) header.metadata.emplace(key, entry.string());
    } else {
      header.tensors.push_back(
          parse_tensor(name, JsonView(value.json(), source + ": tensor \"" + name + "\""), header.data_begin, file_bytes));
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  auto position = header.data_begin;
  for (const auto& tensor : header.tensors) {
    TORCH_CHECK(tensor.begin == position, source, ": tensor \"", tensor.name, "\" starts at byte ", tensor.begin,
                " where the one before it ends at ", position);
    position = tensor.end;
  }
  TORCH_CHECK(position == file_bytes, source, ": the tensors end at byte ", position, " and the file at ", file_bytes);
  return header;
}

} // namespace tessera::internal
