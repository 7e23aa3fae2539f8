#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "gpt/metrics.h"

namespace gpt {

/// Shows how training goes on standard output: a bar that is redrawn on a terminal, a line now and then anywhere else.
class Progress {
 public:
  /// Training ends after step `last`. A silent one shows nothing (every rank but the first).
  Progress(int64_t last, bool silent);

  /// Starts the clock; `first` steps have been done before.
  void begin(int64_t first);

  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  /// Prints `text` on lines of its own.
  void line(const std::string& text);
  /// Ends the bar's line.
  void finish();

 private:
  std::string bar(const StepMetrics& metrics) const;

  int64_t first_ = 0, last_, line_every_ = 1;
  bool silent_, terminal_;
  bool bar_shown_ = false;
  std::optional<double> validation_loss_;
  double tokens_per_second_ = 0; // smoothed
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

} // namespace gpt
