#pragma once

// Internal: the checkpoints that lie beside each other in one folder, among files and folders of others.

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::internal {

/// An error unless everything in the folder `path` is a part of a checkpoint, in any format: what may be replaced.
void check_replaceable(const std::filesystem::path& path);

/// True for a folder that holds some part of a checkpoint, in any format.
bool holds_part_of_checkpoint(const std::filesystem::path& path);
/// An error unless what lies in the folder `path` beside the parts of a checkpoint are files.
void check_others_stay(const std::filesystem::path& path);
/// Links those files into the folder `to` too.
void link_others(const std::filesystem::path& from, const std::filesystem::path& to);

/// An error when something that is no symbolic link has the name `latest` in `root`.
void check_latest_is_link(const std::filesystem::path& root);

/// Makes the link `latest` beside `checkpoint` point at it, in one step.
void point_latest_to(const std::filesystem::path& checkpoint);

/// When the checkpoint that `latest` in `root` points at was saved; 0 when there is none that can be read.
int64_t time_of_latest(const std::filesystem::path& root);

/// "step-#" for "step-000100": names that differ in their numbers alone belong to one series.
std::string series_of(const std::filesystem::path& checkpoint);

/// An error for a name without a number, which `keep_last` could not count.
void check_has_number(const std::filesystem::path& checkpoint);

/// Removes the oldest checkpoints in `root` until `count` are left, never `newest`, of those whose names differ from `newest` in
/// their numbers alone. One that is half removed no longer counts as a checkpoint, nor does one whose index is damaged.
void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest);

} // namespace tessera::internal
