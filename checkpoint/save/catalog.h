#pragma once

// Internal: the checkpoints that lie beside each other in one folder, among files and folders of others.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

namespace tessera::internal {

/// An error unless everything in the folder `path` is a part of a checkpoint, in any format: what may be replaced.
void check_replaceable(const std::filesystem::path& path);

/// True for a folder that holds weights in files of this name: <file_name>, <stem>-00001-of-00002.safetensors, or their index.
bool holds_weights(const std::filesystem::path& path, const std::string& file_name);
/// An error unless what lies in the folder `path` beside these weights are files, none of them of a checkpoint in another format
/// that a load would read instead.
void check_others_stay(const std::filesystem::path& path, const std::string& file_name);
/// Links the files that lie beside these weights into the folder `to` too.
void link_others(const std::filesystem::path& from, const std::filesystem::path& to, const std::string& file_name);

/// An error when something that is no symbolic link has the name `latest` in `root`.
void check_latest_is_link(const std::filesystem::path& root);

/// Makes the link `latest` beside `checkpoint` point at it, in one step.
void point_latest_to(const std::filesystem::path& checkpoint);

/// Finds when the checkpoint that `latest` in `root` points at was saved; 0 when there is none that can be read.
int64_t time_of_latest(const std::filesystem::path& root);

/// What stands before the last number of a name, and after it: names that differ in it alone belong to one series.
using Series = std::pair<std::string, std::string>;
/// Nothing for a name without a number.
std::optional<Series> series_of(const std::filesystem::path& checkpoint);

/// An error for a name without a number, which `keep_last` could not count.
void check_has_number(const std::filesystem::path& checkpoint);

/// Removes the oldest checkpoints in `root` until `count` are left, never `newest`, of those whose names differ from `newest`
/// in the last number alone. One that is half removed no longer counts as a checkpoint, nor does one whose index is damaged.
void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest);

} // namespace tessera::internal
