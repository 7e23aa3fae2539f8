#include "common/progress_bar.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace examples {
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

} // namespace

ProgressBar::ProgressBar(int64_t last, bool silent) : last_(last), silent_(silent), terminal_(isatty(STDOUT_FILENO) != 0) {}

void ProgressBar::begin(int64_t first) {
  first_ = first;
  line_every_ = std::max<int64_t>(1, (last_ - first) / kPlainLines);
  start_ = std::chrono::steady_clock::now();
}

void ProgressBar::step(int64_t step, const std::string& text) {
  if (silent_) return;
  if (terminal_) {
    fmt::print("\r\x1b[K{}", bar(step, text));
    shown_ = true;
  } else if (step % line_every_ == 0 || step == last_ || step == first_ + 1) {
    fmt::print("step {}/{}  {}\n", step, last_, text);
  }
  std::fflush(stdout);
}

void ProgressBar::line(const std::string& text) {
  if (silent_) return;
  finish();
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

void ProgressBar::finish() {
  if (shown_) fmt::print("\n");
  shown_ = false;
}

std::string ProgressBar::bar(int64_t step, const std::string& text) const {
  const auto done = static_cast<double>(step - first_) / static_cast<double>(std::max<int64_t>(1, last_ - first_));
  const auto full = static_cast<int>(done * kBarWidth);
  std::string blocks;
  for (int i = 0; i < kBarWidth; ++i) blocks += i < full ? "━" : "╌";
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const auto before = fmt::format("{}/{} ", step, last_);
  const auto after = fmt::format(" {}<{}  {}", clock(elapsed), clock(elapsed / done - elapsed), text);
  // A line that wraps could not be redrawn.
  const size_t columns = terminal_columns();
  if (before.size() + kBarWidth + after.size() < columns) return before + blocks + after;
  return (before + after).substr(0, columns - 1);
}

} // namespace examples
