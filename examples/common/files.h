#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace examples {

/// Makes the folders above `path`; throws with the cause when it cannot.
void make_folder_of(const std::filesystem::path& path);

/// Opens `path` for writing and makes its folder; throws with the cause when it cannot.
std::ofstream open_for_writing(const std::string& path, bool append = false);

/// The content of the file `path`, which errors call `what` ("the data file"); `hint` tells how to get it where it is missing.
std::string read_file(const std::string& path, const std::string& what, const std::string& hint = "");

} // namespace examples
