#pragma once

// Internal: a file that a log is appended to.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::internal {

/// Makes a folder and those it is in; an error that names the folder and the cause. Nothing for an empty path.
void make_log_folder(const std::string& folder);

/// An open file. What is appended is in the file when the call returns: a process that is killed leaves what it wrote.
class LogFile {
 public:
  /// Opens a file for appending; makes it, and its folder, where there is none.
  explicit LogFile(const std::string& path);
  LogFile(LogFile&& other) noexcept;
  LogFile& operator=(LogFile&& other) noexcept;
  ~LogFile();

  const std::string& path() const { return path_; }
  /// Errors name the file and the cause, as a full disk. None of the bytes stays then.
  void append(std::string_view bytes);
  /// Flushes what was appended to the disk.
  void flush();
  /// What the file holds; nothing for what is no regular file, as a pipe.
  std::string content() const;
  /// Leaves `kept` in the file, which mostly is the beginning of what it held.
  void replace(std::string_view kept);

 private:
  bool is_regular() const;
  void write(std::string_view bytes);

  std::string path_;
  int fd_ = -1;
};

/// The lines of a text that `keep` keeps, which also gets their numbers, from 1. A last line without an end was cut off as it was
/// written, and goes.
std::string kept_lines(std::string_view text, const std::function<bool(std::string_view line, int64_t number)>& keep);

} // namespace tessera::internal
