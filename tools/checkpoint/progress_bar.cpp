#include "progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace {

constexpr int kWidth = 32;
constexpr std::chrono::milliseconds kInterval(100);

} // namespace

ProgressBar::ProgressBar(std::string what, int64_t total_bytes)
    : what_(std::move(what)),
      total_(total_bytes),
      is_terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      drawn_(start_) {}

ProgressBar::~ProgressBar() {
  if (is_terminal_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::add(int64_t bytes) {
  done_ += bytes;
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || now - drawn_ < kInterval) return;
  drawn_ = now;
  draw();
}

void ProgressBar::draw() const {
  const auto share = total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 1.0;
  const auto filled = static_cast<int>(share * kWidth);
  const auto seconds = std::chrono::duration<double>(drawn_ - start_).count();
  fmt::print(stderr, "\r\x1b[K{} [{}{}] {:3.0f} %  {}/s", what_, std::string(filled, '#'), std::string(kWidth - filled, ' '),
             100 * share, human_bytes(static_cast<int64_t>(static_cast<double>(done_) / std::max(seconds, 1e-3))));
  std::fflush(stderr);
}

std::string human_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}
