#include <tessera/training/progress_bar.h>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tessera {

namespace {

constexpr int kBarWidth = 24;
constexpr int64_t kPlainLines = 20;          // of a run without a terminal
constexpr int64_t kPlainStepsOfUnknown = 10; // between them, where the last step is not known

size_t terminal_columns() {
  winsize size = {};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col : 80;
}

std::string clock(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

// The first characters of UTF-8 text that fit; each counts as one column.
std::string first_columns(const std::string& text, size_t columns) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    const bool starts_character = (static_cast<uint8_t>(text[at]) & 0xc0) != 0x80;
    if (starts_character && columns-- == 0) break;
  }
  return text.substr(0, at);
}

} // namespace

ProgressBar::ProgressBar(int64_t last, bool silent) : last_(last), is_silent_(silent), is_terminal_(isatty(STDOUT_FILENO) != 0) {}

void ProgressBar::begin(int64_t first) {
  first_ = first;
  line_every_ = last_ > 0 ? std::max<int64_t>(1, (last_ - first) / kPlainLines) : kPlainStepsOfUnknown;
  start_ = std::chrono::steady_clock::now();
}

void ProgressBar::step(int64_t step, const std::string& text) {
  if (is_silent_) return;
  if (is_terminal_) {
    fmt::print("\r\x1b[K{}", bar(step, text));
    is_shown_ = true;
  } else if (step % line_every_ == 0 || step == last_ || step == first_ + 1) {
    fmt::print("step {}  {}\n", place(step), text);
  }
  std::fflush(stdout);
}

void ProgressBar::line(const std::string& text) {
  if (is_silent_) return;
  finish();
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

void ProgressBar::finish() {
  if (is_shown_) fmt::print("\n");
  is_shown_ = false;
}

std::string ProgressBar::place(int64_t step) const {
  return last_ > 0 ? fmt::format("{}/{}", step, last_) : fmt::format("{}", step);
}

std::string ProgressBar::bar(int64_t step, const std::string& text) const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const size_t columns = terminal_columns() - 1; // a line that wraps could not be redrawn
  if (last_ <= 0) return first_columns(fmt::format("{} {}  {}", place(step), clock(elapsed), text), columns);
  const auto all = static_cast<double>(std::max<int64_t>(1, last_ - first_));
  const auto done = std::clamp(static_cast<double>(step - first_) / all, 0.0, 1.0);
  const auto full = static_cast<int>(done * kBarWidth);
  std::string blocks;
  for (int i = 0; i < kBarWidth; ++i) blocks += i < full ? "━" : "╌";
  const auto rest = done > 0 ? clock(elapsed / done - elapsed) : "?";
  const auto before = place(step) + " ", after = fmt::format(" {}<{}  {}", clock(elapsed), rest, text);
  if (before.size() + kBarWidth + after.size() <= columns) return before + blocks + after;
  return first_columns(before + after, columns);
}

} // namespace tessera
