#pragma once

// Internal: the ranks that save or load together.

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// "rank 0", "ranks 0, 2".
std::string describe_ranks(const std::vector<int64_t>& ranks);

/// What errors call the ranks that save or load, which are numbered from 0: their numbers in the job.
class RankNumbers {
 public:
  RankNumbers() = default; ///< the same numbers
  explicit RankNumbers(std::vector<int64_t> numbers) : numbers_(std::move(numbers)) {}
  int64_t operator[](size_t position) const { return numbers_.empty() ? static_cast<int64_t>(position) : numbers_[position]; }

 private:
  std::vector<int64_t> numbers_;
};

/// The ranks of a mesh, or all ranks of the job; without a process group, this process alone.
class Ranks {
 public:
  /// The ranks of `mesh`; unset: all. Ranks with different purposes may vote at the same time. Each of these ranks makes them in
  /// the same order. An error on any other rank.
  explicit Ranks(const std::optional<DeviceMesh>& mesh = {}, const std::string& purpose = "checkpoint");
  /// Ranks that vote apart from all others that live now. Each of them makes them, and lets them go, in the same order.
  static Ranks unshared(const std::optional<DeviceMesh>& mesh, const std::string& purpose);

  /// This rank's position among them, by ascending rank of the job.
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// An error that names `tensor`, a DTensor called `name`, where a rank that is none of these holds some of it.
  void check_hold_all(const std::string& name, const at::Tensor& tensor) const;

  /// Runs `work` on every rank and gives every rank the results of all, in rank order. When it throws on any rank, every rank
  /// throws, after all have finished, an error that names `step` and each cause with its ranks. So they do where `step` differs
  /// between ranks, which may hold what the user gave: a path, an option. Every rank calls it.
  std::vector<std::string> all(const std::string& step, const std::function<std::string()>& work) const;
  /// Does the same for work without a result.
  template <std::invocable Work>
  requires std::is_void_v<std::invoke_result_t<Work>>
  void all(const std::string& step, Work work) const {
    all(step, [&] {
      work();
      return std::string();
    });
  }
  /// Gives every rank the bytes of rank 0's `tensor`, which is contiguous and on the CPU. Every rank calls it with the same size.
  void broadcast(const at::Tensor& tensor, const std::string& label) const;
  /// Replaces `tensor`, contiguous and on the CPU, by the sum over all ranks. Every rank calls it with the same size.
  void sum(const at::Tensor& tensor, const std::string& label) const;
  RankNumbers numbers() const { return RankNumbers(members_); }
  /// The rank of the job at this position among them.
  int64_t rank_of_job(size_t position) const { return members_[position]; }
  /// The position of a rank of the job, which is one of them.
  size_t position_of(int64_t rank_of_job) const;
  /// One line for each text that is not empty: the ranks that have it, and the text. `texts` are those of all ranks.
  std::string by_ranks(const std::vector<std::string>& texts) const;

 private:
  std::vector<std::string> gather(const std::string& mine, const std::string& step) const;

  CommunicatorPtr communicator_;
  std::vector<int64_t> members_{0}; ///< ranks of the job, ascending
  int rank_ = 0, size_ = 1;
};

} // namespace tessera::internal
