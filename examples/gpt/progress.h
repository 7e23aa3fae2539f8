#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/progress_bar.h"
#include "gpt/metrics.h"

namespace gpt {

/// Shows how training goes, in a bar.
class Progress {
 public:
  /// As for `examples::ProgressBar`.
  Progress(int64_t last, bool silent);

  void begin(int64_t first) { bar_.begin(first); }
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void line(const std::string& text) { bar_.line(text); }
  void finish() { bar_.finish(); }

 private:
  examples::ProgressBar bar_;
  int64_t last_;
  std::optional<double> validation_loss_;
  double tokens_per_second_ = 0; // smoothed
};

} // namespace gpt
