#pragma once

// Internal: records of TensorBoard's event files.
//
// A record is {u64 length, masked CRC of the length, data, masked CRC of the data}, little-endian; a CRC is 32-bit CRC-32C
// (Castagnoli), masked as ((crc >> 15) | (crc << 17)) + 0xa282ead8 (TensorFlow, core/lib/io/record_writer). The data are a
// protobuf message Event (tensorboard/compat/proto/event.proto): wall_time = 1, step = 2, file_version = 3, summary = 5,
// session_log = 7. A Summary has values = 1 of tag = 1 and simple_value = 2.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

/// CRC-32C of `bytes`, not masked.
uint32_t crc32c(std::string_view bytes);

/// The first record of a file.
std::string version_record(double wall_time);
/// Says that a training starts (again) with this step: a reader drops what it has of this step and later ones.
std::string start_record(double wall_time, int64_t step);
/// Numbers by their tags, as 32-bit floats.
std::string scalars_record(double wall_time, int64_t step, const std::vector<std::pair<std::string, double>>& numbers);

/// The record that `bytes` begin with.
struct ParsedRecord {
  size_t bytes; ///< of the record
  int64_t step;
};
/// None where the bytes are no whole record, or one with another checksum.
std::optional<ParsedRecord> parse_record(std::string_view bytes);

} // namespace tessera::internal
