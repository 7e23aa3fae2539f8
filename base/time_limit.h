#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::internal {

/// What `call` returns or throws, or nothing when that takes longer than `limit`, or when `gives_up`, which is asked ten times a
/// second, says true. Its thread is then left behind, so `call` owns what it uses. For calls that have no time limit of their own
/// where a peer accepts a connection and never answers.
template <typename Result>
std::optional<Result> within(
    std::chrono::milliseconds limit, std::function<Result()> call, const std::function<bool()>& gives_up = [] { return false; }) {
  constexpr std::chrono::milliseconds kInterval(100);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::packaged_task<Result()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  while (result.wait_until(std::min(deadline, std::chrono::steady_clock::now() + kInterval)) == std::future_status::timeout)
    if (std::chrono::steady_clock::now() >= deadline || gives_up()) return std::nullopt;
  return result.get();
}

} // namespace tessera::internal
