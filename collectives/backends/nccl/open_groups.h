#pragma once

#include <tessera/base/forks.h>
#include <tessera/collectives/ranks/group_description.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::internal::nccl {

/// Closes communicators whose process ends without `destroy_process_group`, before the CUDA libraries are torn down. What their
/// device has yet to run is waited for, unless a peer is gone.
class OpenGroups {
 public:
  static OpenGroups& instance();

  void add(c10d::ProcessGroupNCCL* group, const GroupDescription& description);
  /// False when the group was aborted already.
  bool remove(c10d::ProcessGroupNCCL* group);

 private:
  struct Peers {
    std::vector<int64_t> ranks;
    std::shared_ptr<RankWatch> watch;
    std::chrono::milliseconds timeout;
  };

  void abort_all();
  void finish_launched() const;

  const int fork_depth_ = fork_depth();
  std::mutex mutex_;
  std::map<c10d::ProcessGroupNCCL*, Peers> groups_;
};

} // namespace tessera::internal::nccl
