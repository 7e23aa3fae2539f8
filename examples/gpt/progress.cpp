#include "gpt/progress.h"

#include <fmt/format.h>

namespace gpt {
namespace {

std::string describe(const StepMetrics& metrics, double tokens_per_second, std::optional<double> validation_loss) {
  auto text = fmt::format("loss {:.4f}", metrics.loss);
  if (validation_loss) text += fmt::format(" (validation {:.4f})", *validation_loss);
  return text + fmt::format("  |grad| {:.3f}  {:.1f}k tokens/s  {:.0f} MiB/rank", metrics.gradient_norm, tokens_per_second / 1e3,
                            metrics.resident_bytes / (1 << 20));
}

} // namespace

Progress::Progress(int64_t last, bool silent) : bar_(last, silent), last_(last) {}

void Progress::step(const StepMetrics& metrics) {
  tokens_per_second_ =
      tokens_per_second_ == 0 ? metrics.tokens_per_second : 0.9 * tokens_per_second_ + 0.1 * metrics.tokens_per_second;
  bar_.step(metrics.step, describe(metrics, tokens_per_second_, validation_loss_));
}

void Progress::validation(int64_t step, double loss) {
  validation_loss_ = loss;
  if (!bar_.terminal()) line(fmt::format("step {}/{}  validation loss {:.4f}", step, last_, loss));
}

} // namespace gpt
