#pragma once

// Internal: the kinds of files that a log is written to.

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/training/training_log.h>

namespace tessera::internal {

/// One kind. Each drops at its opening what was written after `resumed_step`, and everything at 0.
class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(const LogRecord& record) = 0;
  virtual void flush() = 0;
};

std::unique_ptr<LogSink> open_json_lines(const std::string& path, int64_t resumed_step);
std::unique_ptr<LogSink> open_csv_files(const std::string& folder, int64_t resumed_step);
std::unique_ptr<LogSink> open_event_files(const std::string& folder, int64_t resumed_step);

} // namespace tessera::internal
