#pragma once

// Internal: the safetensors format. 8 bytes little-endian length of the header, the header (JSON), then the data of the tensors
// one after another without gaps, row-major and little-endian.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/checkpoint/bytes/byte_source.h>

namespace tessera::internal {

struct SafetensorsTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  int64_t begin = 0, end = 0; ///< bytes, from the start of the file
};

/// Everything in a safetensors file but the data.
struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors; ///< in the order of their data
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0; ///< where the data starts: 8 + the header's length
};

/// "F32", "BF16", …; an error that begins with `what` for a dtype the format does not have.
std::string safetensors_dtype(at::ScalarType dtype, const std::string& what);
/// The inverse; an error for a name that is not known.
at::ScalarType dtype_from_safetensors(const std::string& name, const std::string& what);

/// Sets `begin`, `end` and `data_begin` for tensors that follow one another in this order, and returns the bytes that come before
/// the data. Names must differ.
std::string encode_safetensors(SafetensorsHeader& header, const std::string& source);

/// The first `SafetensorsHeader::data_begin` bytes of a file. An error when the length in them does not fit the file.
std::string read_safetensors_prefix(const ByteSource& file);

/// Reads what `encode_safetensors` or any other writer made: `prefix` is all before the data, `file_bytes` the size of the whole
/// file. Errors, which begin with `source` and name the tensor: wrong JSON, an unknown dtype, a size that is not shape × dtype,
/// overlapping data, gaps, data beyond the file's end or missing at its end.
SafetensorsHeader parse_safetensors(std::string_view prefix, int64_t file_bytes, const std::string& source);

} // namespace tessera::internal
