#pragma once

// Internal: the index of a checkpoint, the file index.json. docs/checkpoint_format.md specifies it.

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/bytes/byte_source.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/saved_state.h>
#include <tessera/dtensor/layout/box.h>

namespace tessera::internal {

inline constexpr const char* kIndexName = "index.json";
/// How every version of it begins.
inline constexpr const char* kIndexStart = R"({"tessera_checkpoint": )";
/// In the metadata of our data files: they are whole only together with an index.
inline constexpr const char* kOwnKey = "tessera_checkpoint";
/// A larger index is neither written nor read: it would take many times its size in memory.
inline constexpr int64_t kMaxIndexBytes = int64_t{512} << 20;
/// Data is checksummed in blocks of this many bytes, counted from the start of each chunk.
inline constexpr int64_t kBlockBytes = 1 << 20;

/// Marks a tensor as one rank's values of another tensor, whose own are the lowest rank's.
struct RankCopy {
  std::string of; ///< the other tensor's name; empty for a tensor that is no such copy
  int64_t rank = 0;
};

/// One box of a tensor in one file.
struct Chunk {
  Box box;
  int64_t file = 0;                ///< position in `Index::files`
  int64_t begin = 0;               ///< byte in the file where the box starts, row-major
  std::vector<uint64_t> checksums; ///< one a block
};

struct IndexedTensor {
  std::string name;
  std::vector<std::string> aliases;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::string layout; ///< the writer's, for people
  std::vector<Chunk> chunks;
  RankCopy copy;
};

struct IndexedFile {
  std::string name; ///< in the checkpoint's folder
  int64_t bytes = 0;
  int64_t data_begin = 0;       ///< bytes before the data
  uint64_t header_checksum = 0; ///< of those bytes
};

struct Index {
  int64_t saved_at = 0; ///< microseconds since 1970
  int64_t world_size = 0;
  int64_t block_bytes = kBlockBytes;
  std::vector<IndexedFile> files;
  std::vector<IndexedTensor> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
  uint64_t checksum = 0;     ///< set when read: tells one checkpoint from another
  bool has_checksums = true; ///< false for folders that others wrote

  SavedState contents() const;
};

/// The text of index.json; its first line holds the checksum of all that follows.
std::string encode_index(const Index& index);

/// Whether a file begins as every version of the index does.
bool begins_as_index(const ByteSource& file);

/// Reads and checks the index of the checkpoint `folder`: checksum, fields, and that the chunks of every tensor cover it without
/// overlap and lie within their files. Errors name the file and the tensor; a folder without an index is "not a complete
/// checkpoint".
Index read_index(const std::filesystem::path& folder);

/// Checks the fields against each other, as `read_index` does, and sorts the chunks. `source` begins every error.
void validate(Index& index, const std::string& source);

/// The same from text; `source` begins every error.
Index parse_index(std::string_view text, const std::string& source);

/// JSON of one chunk and one file, as ranks send them to each other.
Json to_json(const Chunk& chunk);
Chunk chunk_from_json(const JsonView& json);
Json to_json(const IndexedFile& file);
IndexedFile file_from_json(const JsonView& json);

/// The number of blocks of a chunk of `bytes`.
inline int64_t block_count(int64_t bytes, int64_t block_bytes) { return (bytes + block_bytes - 1) / block_bytes; }

} // namespace tessera::internal
