#pragma once

#include <cstdint>
#include <string>

#include "common/json_lines.h"
#include "gpt/options.h"

namespace gpt {

/// What one training step measured; `loss` and `resident_bytes` are means over the ranks.
struct StepMetrics {
  int64_t step = 0; ///< counted from 1
  double loss = 0;  ///< of the batch, before the step; nats a byte
  double learning_rate = 0;
  double gradient_norm = 0; ///< global, before clipping; not finite in a step that --precision fp16 skips, and null in the log
  double tokens_per_second = 0;
  double resident_bytes = 0;
};

/// A file of JSON objects, one a line, each with a "kind": "run" first, then "step" and "validation", and "end".
class JsonLog {
 public:
  /// As for `examples::JsonLines`.
  JsonLog(const std::string& path, bool append) : lines_(path, append) {}

  void run(const Options& options, int world, int64_t parameters, double unigram_entropy);
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void end(int64_t step, double seconds, int64_t state_bytes);

 private:
  examples::JsonLines lines_;
};

} // namespace gpt
