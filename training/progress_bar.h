#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tessera {

/// Shows on standard output how far a training has come: a bar that is redrawn on a terminal, about twenty lines in all anywhere
/// else. For the rank that prints; one thread at a time.
class ProgressBar {
 public:
  /// The work ends with step `last`; 0: that is not known, so there is no bar, and a line each tenth step where there is no
  /// terminal. A silent one shows nothing, as every rank's but the first.
  explicit ProgressBar(int64_t last, bool silent = false);

  /// Starts the clock; `first` steps have been done before.
  void begin(int64_t first);
  /// `step` steps are done; `text` says how it goes.
  void step(int64_t step, const std::string& text);
  /// Prints `text` on lines of its own.
  void line(const std::string& text);
  /// Ends the bar's line.
  void finish();

  bool is_terminal() const { return is_terminal_; }

 private:
  std::string bar(int64_t step, const std::string& text) const;
  std::string place(int64_t step) const;

  int64_t first_ = 0, last_, line_every_ = 1;
  bool is_silent_, is_terminal_;
  bool is_shown_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

} // namespace tessera
