#include <tessera/base/text_table.h>

#include <algorithm>

namespace tessera::internal {

std::string text_table(const std::vector<TextRow>& rows, std::initializer_list<std::string_view> numbers) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool is_number = std::find(numbers.begin(), numbers.end(), rows[0][i]) != numbers.end();
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (is_number ? padding + row[i] : row[i] + padding) + "  ";
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

} // namespace tessera::internal
