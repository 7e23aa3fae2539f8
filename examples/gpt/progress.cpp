#include "gpt/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace gpt {
namespace {

constexpr int kBarWidth = 24;
constexpr int kPlainLines = 20; // a run prints about so many where there is no bar

size_t terminal_columns() {
  winsize size = {};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col : 80;
}

std::string clock(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string describe(const StepMetrics& metrics, double tokens_per_second, std::optional<double> validation_loss) {
  auto text = fmt::format("loss {:.4f}", metrics.loss);
  if (validation_loss) text += fmt::format(" (validation {:.4f})", *validation_loss);
  return text + fmt::format("  |grad| {:.3f}  {:.1f}k tokens/s  {:.0f} MiB/rank", metrics.gradient_norm, tokens_per_second / 1e3,
                            metrics.resident_bytes / (1 << 20));
}

} // namespace

Progress::Progress(int64_t last, bool silent) : last_(last), silent_(silent), terminal_(isatty(STDOUT_FILENO) != 0) {}

void Progress::begin(int64_t first) {
  first_ = first;
  line_every_ = std::max<int64_t>(1, (last_ - first) / kPlainLines);
  start_ = std::chrono::steady_clock::now();
}

void Progress::step(const StepMetrics& metrics) {
  tokens_per_second_ =
      tokens_per_second_ == 0 ? metrics.tokens_per_second : 0.9 * tokens_per_second_ + 0.1 * metrics.tokens_per_second;
  if (silent_) return;
  if (terminal_) {
    fmt::print("\r\x1b[K{}", bar(metrics));
    bar_shown_ = true;
  } else if (metrics.step % line_every_ == 0 || metrics.step == last_ || metrics.step == first_ + 1) {
    fmt::print("step {}/{}  {}\n", metrics.step, last_, describe(metrics, tokens_per_second_, validation_loss_));
  }
  std::fflush(stdout);
}

void Progress::validation(int64_t step, double loss) {
  validation_loss_ = loss;
  if (!terminal_) line(fmt::format("step {}/{}  validation loss {:.4f}", step, last_, loss));
}

void Progress::line(const std::string& text) {
  if (silent_) return;
  finish();
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

void Progress::finish() {
  if (bar_shown_) fmt::print("\n");
  bar_shown_ = false;
}

std::string Progress::bar(const StepMetrics& metrics) const {
  const auto done = static_cast<double>(metrics.step - first_) / static_cast<double>(std::max<int64_t>(1, last_ - first_));
  const auto full = static_cast<int>(done * kBarWidth);
  std::string blocks;
  for (int i = 0; i < kBarWidth; ++i) blocks += i < full ? "━" : "╌";
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const auto before = fmt::format("{}/{} ", metrics.step, last_);
  const auto after = fmt::format(" {}<{}  {}", clock(elapsed), clock(elapsed / done - elapsed),
                                 describe(metrics, tokens_per_second_, validation_loss_));
  // A line that wraps could not be redrawn.
  const size_t columns = terminal_columns();
  if (before.size() + kBarWidth + after.size() < columns) return before + blocks + after;
  return (before + after).substr(0, columns - 1);
}

} // namespace gpt
