#pragma once

// Internal: one rank's files of a checkpoint.

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/plan.h>
#include <tessera/checkpoint/snapshot.h>

namespace tessera::checkpoint {

/// What a rank wrote: its files, and the chunks with the position of their tensor in the plan. `Chunk::file` counts from this
/// rank's first file.
struct Written {
  std::vector<IndexedFile> files;
  std::vector<std::pair<int64_t, Chunk>> chunks;
};

Json to_json(const Written& written);
Written written_from_json(const JsonView& json);

/// A part that a rank writes, and its data.
struct OwnedPart {
  int64_t tensor = 0; ///< position in the plan
  const Holding* what = nullptr;
  Box box;
  at::Tensor data;
};

/// What `plan` gives to `rank`, in the plan's order.
std::vector<OwnedPart> parts_of(const SavePlan& plan, int rank, const Snapshot& snapshot);

/// Writes the parts that `plan` gives to `rank`, from the data of `snapshot`, to new files in `folder`, and flushes them to the
/// disk. A file holds a name once: further boxes of the same tensor go to further files. No file when there is nothing to write.
Written write_parts(const SavePlan& plan, int rank, const Snapshot& snapshot, const std::filesystem::path& folder);

} // namespace tessera::checkpoint
