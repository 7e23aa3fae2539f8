#include <tessera/collectives/backends/nccl/open_groups.h>

#include <tessera/base/time_limit.h>

#include <c10/util/Exception.h>

#include <cstdlib>
#include <exception>

namespace tessera::internal::nccl {

OpenGroups& OpenGroups::instance() {
  static auto* const groups = new OpenGroups; // outlives all that may still ask for it
  return *groups;
}

void OpenGroups::add(c10d::ProcessGroupNCCL* group, const GroupDescription& description) {
  static const int registered = std::atexit([] { instance().abort_all(); }); // after CUDA's own handlers, hence called before
  TORCH_CHECK(registered == 0, "atexit failed with error ", registered);
  std::lock_guard lock(mutex_);
  groups_.insert({group, {description.ranks, description.watch, description.options.timeout}});
}

bool OpenGroups::remove(c10d::ProcessGroupNCCL* group) {
  std::lock_guard lock(mutex_);
  return groups_.erase(group) == 1;
}

void OpenGroups::abort_all() {
  if (fork_depth() != fork_depth_) return; // they are the parent's
  std::lock_guard lock(mutex_);
  finish_launched();
  for (auto& [group, peers] : groups_) {
    try {
      group->abort();
    } catch (...) { // the process ends
    }
  }
  groups_.clear();
}

// The host may be ahead of the device, and the other ranks wait for the collectives that the device has yet to run.
void OpenGroups::finish_launched() const {
  for (const auto& [group, peers] : groups_) {
    const auto wait = [group = group] { return group->waitForPendingWorks(), true; };
    const auto misses_one = [&peers = peers] { return peers.watch->find_missing(peers.ranks).has_value(); };
    try {
      if (!within<bool>(peers.timeout, wait, misses_one)) return; // what the other groups wait for does not come either
    } catch (const std::exception&) {                             // a failed collective: nothing is left to wait for
    }
  }
}

} // namespace tessera::internal::nccl
