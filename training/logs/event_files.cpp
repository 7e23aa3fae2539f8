#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <utility>

#include <tessera/base/host_name.h>
#include <tessera/training/logs/event_record.h>
#include <tessera/training/logs/log_file.h>
#include <tessera/training/logs/log_folder.h>
#include <tessera/training/logs/log_sink.h>

namespace tessera::internal {

namespace {

constexpr std::string_view kEnding = ".tessera"; // other writers' files stay as they are

double wall_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

/// TensorBoard knows a file by "tfevents" in its name, and reads the files of a folder in the order of their names.
std::string new_file_name() {
  const auto now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  return fmt::format("events.out.tfevents.{}.{:09}.{}.{}{}", now / 1000000000, now % 1000000000, host_name(), ::getpid(),
                     kEnding);
}

/// The records up to a step. What is no record ends the file: it was cut off as it was written.
std::string kept_records(std::string_view content, int64_t resumed_step) {
  std::string kept;
  while (const auto record = parse_record(content)) {
    if (record->step <= resumed_step) kept += content.substr(0, record->bytes);
    content.remove_prefix(record->bytes);
  }
  return kept;
}

/// One file for each run, in one folder.
class EventFiles final : public LogSink {
 public:
  EventFiles(const std::string& folder, int64_t resumed_step) : file_(prepared(folder, resumed_step)) {
    file_.append(version_record(wall_time()));
    // A TensorBoard that is reading has later steps of the run that was cut off.
    if (resumed_step > 0) file_.append(start_record(wall_time(), resumed_step + 1));
  }

  void write(const LogRecord& record) override {
    if (!record.numbers.empty()) file_.append(scalars_record(wall_time(), record.step, record.numbers));
  }

  void flush() override { file_.flush(); }

 private:
  /// The new file's path.
  static std::string prepared(const std::string& folder, int64_t resumed_step) {
    for (const auto& path : files_of_log(folder, kEnding)) {
      if (resumed_step == 0) {
        remove_log_file(path);
      } else {
        LogFile file(path);
        file.replace(kept_records(file.content(), resumed_step));
      }
    }
    return (std::filesystem::path(folder) / new_file_name()).string();
  }

  LogFile file_;
};

} // namespace

std::unique_ptr<LogSink> open_event_files(const std::string& folder, int64_t resumed_step) {
  return std::make_unique<EventFiles>(folder, resumed_step);
}

} // namespace tessera::internal
