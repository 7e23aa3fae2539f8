#pragma once

#include <string>
#include <vector>

/// Lines of columns as wide as their widest cell; the first row is the header. Columns in `right` are aligned right.
std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::vector<size_t>& right = {});
