#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/communicator.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

struct ProcessGroupOptions {
  /// A collective that takes longer is an error on every rank. Overridden by TESSERA_TIMEOUT_SECONDS.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  /// Compares the signature of every collective over a side channel; overridden by TESSERA_CHECK_COLLECTIVES=0|1.
  bool check_collectives = true;
};

/// The one process-wide state: who this process is, the store, and the communicators made so far.
class ProcessContext {
 public:
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  const ProcessGroupOptions& options() const { return options_; }
  /// The job's key-value store. Needs <torch/csrc/distributed/c10d/Store.hpp>.
  c10::intrusive_ptr<c10d::Store> store() const;

  /// The communicator of `ranks` (global, in group order) on `device_type`, made at the first call and shared afterwards.
  /// Communicators with different `purpose` run independently of each other (for example: all-gathers beside reduce-scatters).
  /// Called by every rank in `ranks`, in the same order as their other calls with the same ranks.
  CommunicatorPtr communicator(const std::vector<int64_t>& ranks, at::DeviceType device_type,
                               const std::string& purpose = "default");
  /// Grows with every call in this process, from 1, without communication: for names that must differ.
  int64_t next_number() { return ++last_number_; }
  /// Sum over all communicators of this process.
  CollectiveCounters::Count count(CollectiveKind kind) const;
  void reset_counters();

  ~ProcessContext();

 private:
  friend void init_process_group(const ProcessGroupOptions&);
  ProcessContext() = default;
  struct Communicators;

  int rank_ = 0, world_size_ = 1, local_rank_ = 0;
  int64_t last_number_ = 0;
  ProcessGroupOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<Communicators> communicators_;
};

/// Joins the job that the environment describes: torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
/// TORCHELASTIC_USE_AGENT_STORE), Slurm, Open MPI, or `tessera::launch`. Without any of them: a job of one rank.
/// Called once by every rank; returns when all have joined, or throws after the timeout and names the ranks that are missing.
/// A process forked later is in no job.
void init_process_group(const ProcessGroupOptions& options = {});
bool is_initialized();
/// The context; an error before `init_process_group`.
ProcessContext& process_context();
/// Releases the communicators and the store. Every rank calls it; nothing sharded may be used afterwards.
void destroy_process_group();

/// True when CUDA tensors and meshes can be used. Loads LibTorch's CUDA libraries where this build has a CUDA side and the
/// program did not link them: call it before any other use of LibTorch, which asks for CUDA once and remembers the answer.
bool cuda_is_available();

} // namespace tessera
