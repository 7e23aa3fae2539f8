#pragma once

#include <chrono>
#include <cstdint>
#include <string>

/// A line on standard error that shows how much of a number of bytes is done; nothing where standard error is no terminal.
class ProgressBar {
 public:
  ProgressBar(std::string what, int64_t total_bytes);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  /// Removes the line.
  ~ProgressBar();

  void add(int64_t bytes);

 private:
  void draw() const;

  std::string what_;
  int64_t total_, done_ = 0;
  bool is_terminal_;
  std::chrono::steady_clock::time_point start_, drawn_;
};

/// "12.3 MiB".
std::string human_bytes(int64_t bytes);
