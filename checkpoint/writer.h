#pragma once

// Internal: one rank's files of a checkpoint.

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/plan.h>

namespace tessera::checkpoint {

/// What a rank wrote: its files, and the chunks with the position of their tensor in the plan. `Chunk::file` counts from this
/// rank's first file.
struct Written {
  std::vector<IndexedFile> files;
  std::vector<std::pair<int64_t, Chunk>> chunks;
};

Json to_json(const Written& written);
Written written_from_json(const JsonView& json);

/// Writes the parts that `plan` gives to `rank`, from the tensors of `state`, to new files in `folder`, and flushes them to the
/// disk. A file holds a name once: further boxes of the same tensor go to further files. No file when there is nothing to write.
Written write_parts(const SavePlan& plan, int rank, const StateDict& state, const std::filesystem::path& folder);

} // namespace tessera::checkpoint
