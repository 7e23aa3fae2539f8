#pragma once

// Internal: one rank's files of a checkpoint.

#include <filesystem>
#include <functional>
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

/// A part that a rank writes.
struct OwnedPart {
  int64_t tensor = 0; ///< position in the plan
  const Holding* what = nullptr;
  Box box;
  std::function<at::Tensor()> data; ///< called when it is written
};

/// What `plan` gives to `rank`, in the plan's order.
std::vector<OwnedPart> parts_of(const SavePlan& plan, int rank, const Snapshot& snapshot);

/// Writes `parts` as the files of `rank`, new files in `folder`, and flushes them to the disk. A file holds a name once: further
/// boxes of the same tensor go to further files. No file when there is nothing to write. `own` marks the files as parts of a
/// checkpoint with an index.
Written write_parts(const std::vector<OwnedPart>& parts, int rank, const std::filesystem::path& folder, bool own);

} // namespace tessera::checkpoint
