#pragma once

// Internal: the checkpoints that lie beside each other in one folder.

#include <filesystem>
#include <vector>

namespace tessera::checkpoint {

inline constexpr const char* kLatestName = "latest";

/// The complete checkpoints in `root`, oldest first. Folders without an index are none; a damaged index is an error.
std::vector<std::filesystem::path> list(const std::filesystem::path& root);

/// Makes the link `latest` beside `checkpoint` point at it, in one step.
void point_latest_to(const std::filesystem::path& checkpoint);

/// Removes the oldest checkpoints in `root` until `count` are left, never `newest`. One that is half removed no longer counts as
/// a checkpoint.
void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest);

} // namespace tessera::checkpoint
