#pragma once

// Internal: uncompressed zip archives, with 64-bit sizes and offsets where they are needed.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::internal {

/// A file of an archive. Its data follows its header.
struct ZipEntry {
  std::string name;
  int64_t bytes = 0;
  int64_t header_begin = 0; ///< in the file that holds the archive
  int64_t data_begin = 0;
  uint32_t crc = 0; ///< CRC-32 of the data
};

/// The least and the most bytes that a header of an entry may have.
int64_t least_zip_header(const std::string& name, int64_t bytes);
inline constexpr int64_t kZipPadding = 4; ///< a header longer than the least one is longer by at least so much

/// The header of an entry, filled up to where its data begins.
std::string zip_header(const ZipEntry& entry);

/// What ends an archive, for byte `begin` of the file.
std::string zip_directory(const std::vector<ZipEntry>& entries, int64_t begin);

} // namespace tessera::internal
