#pragma once

#include <tessera/collectives/work.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace tessera::internal {

/// One `Work` for several.
inline Work combine(std::vector<Work> works) {
  struct State final : WorkState {
    explicit State(std::vector<Work> w) : works(std::move(w)) {}
    void wait() override {
      for (auto work : works) work.wait(); // on a copy, because `wait` resets the handle and other threads read these
    }
    bool is_completed() override {
      return std::all_of(works.begin(), works.end(), [](const auto& work) { return work.is_completed(); });
    }
    bool blocks_host() const override {
      return std::any_of(works.begin(), works.end(), [](const auto& work) { return work.blocks_host(); });
    }
    const std::vector<Work> works;
  };
  return Work(std::make_shared<State>(std::move(works)));
}

} // namespace tessera::internal
