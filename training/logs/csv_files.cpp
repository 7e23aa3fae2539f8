#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include <tessera/training/logs/log_file.h>
#include <tessera/training/logs/log_folder.h>
#include <tessera/training/logs/log_sink.h>

namespace tessera::internal {

namespace {

constexpr std::string_view kColumns = "step,value\n";

// DeepSpeed's csv_monitor names its files so.
std::string file_name_of(const std::string& number) {
  std::string name = number;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || c == ' ' || c == '\0'; }, '_');
  return name + ".csv";
}

/// A file for each number.
class CsvFiles final : public LogSink {
 public:
  CsvFiles(const std::string& folder, int64_t resumed_step) : folder_(folder) {
    for (const auto& path : files_of_log(folder, ".csv")) {
      LogFile file(path);
      const auto content = file.content();
      if (!content.starts_with(kColumns)) continue; // another program's
      if (resumed_step == 0) {
        remove_log_file(path);
      } else {
        file.replace(kept_rows(content, path, resumed_step));
      }
    }
  }

  void write(const LogRecord& record) override {
    for (const auto& [name, value] : record.numbers) {
      file_of(name).append(fmt::format("{},{}\n", record.step, std::isnan(value) ? std::abs(value) : value));
    }
  }

  void flush() override {
    for (auto& [unused, file] : files_) file.flush();
  }

 private:
  static std::string kept_rows(std::string_view content, const std::string& path, int64_t resumed_step) {
    return kept_lines(content, [&](std::string_view line, int64_t number) {
      if (number == 1) return true;
      int64_t step = 0;
      const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
      TORCH_CHECK(error == std::errc() && end != line.data() + line.size() && *end == ',', "cannot resume the log ", path,
                  ": line ", number, " is no \"step,value\"");
      return step <= resumed_step;
    });
  }

  LogFile& file_of(const std::string& number) {
    if (const auto found = files_.find(number); found != files_.end()) return found->second;
    const auto name = file_name_of(number);
    for (const auto& [other, unused] : files_) {
      TORCH_CHECK_VALUE(file_name_of(other) != name, "the numbers \"", other, "\" and \"", number,
                        "\" of a log would both be in ", folder_, "/", name);
    }
    LogFile file((std::filesystem::path(folder_) / name).string());
    if (file.content().empty()) file.append(kColumns);
    return files_.emplace(number, std::move(file)).first->second;
  }

  std::string folder_;
  std::map<std::string, LogFile> files_;
};

} // namespace

std::unique_ptr<LogSink> open_csv_files(const std::string& folder, int64_t resumed_step) {
  return std::make_unique<CsvFiles>(folder, resumed_step);
}

} // namespace tessera::internal
