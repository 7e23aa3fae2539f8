#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/process_group_options.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::internal {

/// The processes of ranks that have met, and where they run. In the order of the ranks.
struct Places {
  std::vector<std::string> hosts;     ///< equal for processes that can reach each other over the loopback address
  std::vector<std::string> processes; ///< what `RankWatch::own_process` returns there
  std::string name;                   ///< of this meeting: no other has it

  /// The hosts of the ranks with these indices, numbered in the order of their first ranks.
  std::vector<int> hosts_of(const std::vector<int64_t>& indices) const;
};

/// Ranks that meet in a store.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store; ///< with no keys of an earlier meeting
  std::vector<int64_t> ranks;            ///< as errors name them
  int rank = 0;                          ///< this process's index in `ranks`
  ProcessGroupOptions options;
  std::string call;                     ///< for errors: init_process_group
  std::string store_name = "the store"; ///< for errors: the store at 10.0.0.7:29500, which rank 0 hosts
};

/// Waits for all ranks. Called by every one of them. An error where another process has come as this rank, and one that names
/// those who do not come within the timeout, or that have another transport or `check_collectives`; or with what `give_up`
/// returns, which is asked a few times a second, as long as that is not empty. One that names the store where that ends first.
Places meet(const Rendezvous& meeting, const std::function<std::string()>& give_up = nullptr);
/// The members of `indices` that have not come. A few requests.
std::vector<int64_t> absent_from(c10d::Store& store, const std::vector<int64_t>& indices);

} // namespace tessera::internal
