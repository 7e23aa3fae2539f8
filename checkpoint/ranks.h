#pragma once

// Internal: the ranks that save or load together.

#include <functional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>

namespace tessera::checkpoint {

/// All ranks of the job; without a process group, this process alone.
class Ranks {
 public:
  /// Ranks with different purposes may vote at the same time. Every rank makes them in the same order.
  explicit Ranks(const std::string& purpose = "checkpoint");
  /// Ranks that vote apart from all others that live now. Every rank makes them, and lets them go, in the same order.
  static Ranks unshared(const std::string& purpose);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Runs `work` on every rank and gives every rank the results of all, in rank order. When it throws on any rank, every rank
  /// throws, after all have finished, an error that names `step` and each failed rank with its cause. Every rank calls it.
  std::vector<std::string> all(const std::string& step, const std::function<std::string()>& work) const;
  /// Gives every rank the bytes of rank 0's `tensor`, which is contiguous and on the CPU. Every rank calls it with the same size.
  void broadcast(const at::Tensor& tensor, const std::string& label) const;

 private:
  std::vector<std::string> gather(const std::string& mine, const std::string& label) const;

  CommunicatorPtr communicator_;
  int rank_ = 0, size_ = 1;
};

} // namespace tessera::checkpoint
