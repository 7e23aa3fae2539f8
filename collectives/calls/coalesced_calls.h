#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <tessera/collectives/calls/combined_work.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::internal {

/// What one thread starts inside `Communicator::coalesced`, where every call starts at once.
class CoalescedCalls {
 public:
  /// Runs `issue` and returns one `Work` for what was noted meanwhile on this thread.
  Work run(const std::function<void()>& issue, const std::string& group) {
    TORCH_CHECK(thread_ == std::thread::id(), "coalesced calls on group ", group, " do not nest");
    thread_ = std::this_thread::get_id();
    const auto end = c10::make_scope_exit([&] {
      works_.clear();
      thread_ = std::thread::id(); // another may come now
    });
    issue();
    return combine(std::move(works_));
  }

  /// Returns `work`.
  Work note(Work work) {
    if (thread_ == std::this_thread::get_id()) works_.push_back(work);
    return work;
  }

 private:
  std::atomic<std::thread::id> thread_{}; // the one that is in `run`
  std::vector<Work> works_;
};

} // namespace tessera::internal
