#pragma once

// Internal: the checkpoints that lie beside each other in one folder, among files and folders of others.

#include <cstdint>
#include <filesystem>
#include <vector>

namespace tessera::checkpoint {

inline constexpr const char* kLatestName = "latest";

/// An error unless everything in the folder `path` is a part of a checkpoint, in any format: what may be replaced.
void check_replaceable(const std::filesystem::path& path);

/// An error when something that is no symbolic link has the name `latest` in `root`.
void check_latest_is_link(const std::filesystem::path& root);

/// Makes the link `latest` beside `checkpoint` point at it, in one step.
void point_latest_to(const std::filesystem::path& checkpoint);

/// When the checkpoint that `latest` in `root` points at was saved; 0 when there is none that can be read.
int64_t time_of_latest(const std::filesystem::path& root);

/// Removes the oldest checkpoints in `root` until `count` are left, never `newest`. One that is half removed no longer counts as
/// a checkpoint, nor does one whose index is damaged.
void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest);

} // namespace tessera::checkpoint
