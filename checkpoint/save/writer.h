#pragma once

// Internal: one rank's files of a checkpoint.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/save/snapshot.h>

namespace tessera::internal {

/// What a rank wrote: its files, and the chunks with the position of their tensor in the plan. `Chunk::file` counts from this
/// rank's first file.
struct Written {
  std::vector<IndexedFile> files;
  std::vector<std::pair<int64_t, Chunk>> chunks;
};

Json to_json(const Written& written);
Written written_from_json(const JsonView& json);

/// A part that a rank writes.
struct OwnedPart {
  int64_t tensor = 0; ///< position in the plan
  const Holding* what = nullptr;
  Box box;
  std::function<at::Tensor()> data; ///< called when it is written
};

/// What `plan` gives to `rank`, in the plan's order.
std::vector<OwnedPart> parts_of(const SavePlan& plan, int rank, const Snapshot& snapshot);

/// Called with bytes in memory, how many they are, and where they lie in a file.
using RunVisitor = std::function<void(const char*, int64_t, int64_t)>;

/// Writes a part to its places in a file that holds the whole tensor, row-major and in this dtype, from byte `begin` on. Of a
/// part that is not in memory as it is written, 16 MiB are copied at a time. `visit` is called for each run. Errors name the
/// tensor.
void write_into_whole(
    File& file, const OwnedPart& part, at::ScalarType dtype, int64_t begin,
    const RunVisitor& visit = [](const char*, int64_t, int64_t) {});

/// A new file that holds parts of tensors.
class PartFile {
 public:
  virtual ~PartFile() = default;
  /// The bytes before the data; first of all.
  virtual void write_prefix(std::string_view prefix) = 0;
  /// A tensor on the host, row-major in memory, at byte `begin`, where what was written before ends. Returns the checksum of each
  /// block.
  virtual std::vector<uint64_t> write_tensor(const at::Tensor& tensor, int64_t begin) = 0;
  /// The file is durable from now on.
  virtual void close() = 0;
};

/// Makes the files of a rank, and begins their names.
struct NewFiles {
  std::function<std::unique_ptr<PartFile>(const std::string& name)> create;
  std::string name_prefix;
};

/// New files in a folder.
NewFiles files_in(const std::filesystem::path& folder);

/// Writes `parts` as the files of `rank`. A file holds a name once: further boxes of the same tensor go to further files. No file
/// when there is nothing to write. `own` marks the files as parts of a checkpoint with an index.
Written write_parts(const std::vector<OwnedPart>& parts, int rank, const NewFiles& new_files, bool own);

} // namespace tessera::internal
