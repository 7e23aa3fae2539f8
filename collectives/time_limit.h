#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::internal {

/// What `call` returns or throws, or nothing when that takes longer than `limit`: its thread is then left behind, so `call` owns
/// what it uses. For calls that have no time limit of their own where a peer accepts a connection and never answers.
template <typename Result>
std::optional<Result> within(std::chrono::milliseconds limit, std::function<Result()> call) {
  std::packaged_task<Result()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(limit) == std::future_status::timeout) return std::nullopt;
  return result.get();
}

} // namespace tessera::internal
