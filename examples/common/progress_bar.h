#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace examples {

/// Shows on standard output how far a number of steps has come: a bar that is redrawn on a terminal, a line now and then anywhere
/// else.
class ProgressBar {
 public:
  /// The work ends with step `last`. A silent one shows nothing (every rank but the first).
  ProgressBar(int64_t last, bool silent);

  /// Starts the clock; `first` steps have been done before.
  void begin(int64_t first);
  /// `step` steps are done; `text` says how it goes.
  void step(int64_t step, const std::string& text);
  /// Prints `text` on lines of its own.
  void line(const std::string& text);
  /// Ends the bar's line.
  void finish();

  bool terminal() const { return terminal_; }

 private:
  std::string bar(int64_t step, const std::string& text) const;

  int64_t first_ = 0, last_, line_every_ = 1;
  bool silent_, terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

} // namespace examples
