#pragma once

// Internal: the files that an earlier run has left in a folder.

#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// The paths of the folder's files with names that end so, sorted. Makes the folder where there is none. Errors name it, and say
/// why it cannot be made, or why nothing could be written to it.
std::vector<std::string> files_of_log(const std::string& folder, std::string_view ending);

void remove_log_file(const std::string& path);

} // namespace tessera::internal
