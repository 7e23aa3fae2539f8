#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/process_group_options.h>
#include <tessera/collectives/simulated_clock.h>
#include <tessera/collectives/topology.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

class ProcessContext;

namespace internal {
class RankScope;
/// The context of a rank of a simulated group, not yet in use.
std::unique_ptr<ProcessContext> make_simulated_context(const Topology& topology, int rank, const SimulationOptions& options);
} // namespace internal

/// The state of the job in this process: who it is, the store, and the communicators made so far.
class ProcessContext {
 public:
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  /// How many of the ranks, all of them processes, are on this one's host; 1 where they are not processes.
  int local_world_size() const { return local_world_size_; }
  const ProcessGroupOptions& options() const { return options_; }
  /// The job's key-value store.
  c10::intrusive_ptr<c10d::Store> store() const { return store_; }
  /// Whether the other ranks exist in name only (a fake or a simulated group): a mesh may be on the meta device.
  bool is_pretended() const { return is_pretended_; }
  /// The clock of a simulated process group; null for any other.
  SimulatedClock* simulated_clock() const { return clock_.get(); }

  /// The communicator of `ranks` (global, in group order) on `device_type`, made at the first call and shared afterwards.
  /// Communicators with different `purpose` run independently of each other (for example: all-gathers beside reduce-scatters).
  /// Each is kept, with its threads and file descriptors, until `destroy_process_group`: use few purposes, and no step's number.
  /// Called by every rank in `ranks`, in the same order as their other calls with the same ranks.
  /// Where it could not be connected, the same call again is an error: another attempt needs another `purpose`.
  CommunicatorPtr communicator(const RankList& ranks, at::DeviceType device_type, const std::string& purpose = "default");
  /// Grows with every call in this process, from 1, without communication: for names that must differ.
  int64_t next_number() { return ++last_number_; }
  /// Sum over all communicators of this process.
  CollectiveCounters::Count count(CollectiveKind kind) const;
  void reset_counters();

  ~ProcessContext();

 private:
  friend void init_process_group(const ProcessGroupOptions&);
  friend void init_fake_process_group(int, int);
  friend void init_simulated_process_group(const Topology&, int, const SimulationOptions&);
  friend class internal::RankScope;
  friend std::unique_ptr<ProcessContext> internal::make_simulated_context(const Topology&, int, const SimulationOptions&);
  friend void write_trace(const std::string&);
  using Connect = std::function<CommunicatorPtr(std::string name, RankList ranks, int rank, at::DeviceType device_type)>;
  struct Communicators;
  ProcessContext() = default;
  /// Makes the context of a job that is not one of processes.
  ProcessContext(int rank, int world_size, Connect connect);
  CommunicatorPtr connect_processes(const RankList& ranks, int place, at::DeviceType device_type, const std::string& purpose);

  int rank_ = 0, world_size_ = 1, local_rank_ = 0, local_world_size_ = 1;
  bool is_pretended_ = false;
  int64_t last_number_ = 0;
  ProcessGroupOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<SimulatedClock> clock_;
  Connect connect_; ///< null where ranks are processes
  std::unique_ptr<Communicators> communicators_;
};

/// Joins the job that the environment describes: torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
/// TORCHELASTIC_USE_AGENT_STORE), Slurm, Open MPI, or `tessera::launch`. Without any of them: a job of one rank. Or the job of
/// `ProcessGroupOptions::own_store`.
/// Called once by every rank; returns when all have joined, or throws after the timeout and names the ranks that are missing.
///
/// If the process of a rank ends, with any status, the ranks that wait for it in a collective or while a group is made get an
/// error. It comes within a second, with the number of the rank, if they run on its host or have a connection to it. If ranks
/// fail one after another because of it, all of them name the first. If the store has ended with its process (rank 0 under srun
/// and mpirun), each names all ranks that it sees to have ended, or else those whose connections it lost. A rank that has
/// finished may end at any time, with or without `destroy_process_group`: nobody waits for it.
///
/// A process that is forked later belongs to no job: collectives of its parent's groups are errors there, and programs that it
/// starts inherit no connection. (A program that another thread starts while a group is made may.) If this call needs more file
/// descriptors than the soft limit allows (one for each rank of this host, and a few), or a group does (one for each peer, and a
/// few), the soft limit is raised, up to the hard limit. Beyond that it is an error.
void init_process_group(const ProcessGroupOptions& options = {});
/// Instead of `init_process_group`: this single process pretends to be rank `rank` of a job of `world_size` ranks, as with
/// PyTorch's "fake" process group. Collectives return at once, with the result that they would have if every rank held the values
/// of this one. Their counters count what they would send. For measurements of host cost, memory and bytes on any number of
/// ranks.
void init_fake_process_group(int rank, int world_size);
/// As `init_fake_process_group`, with modelled time: the topology's links determine how long collectives take, in parallel to the
/// rank's own work, on the clock that `simulated_clock()` returns. For predictions of a step on another cluster:
/// docs/simulated_cluster.md.
void init_simulated_process_group(const Topology& topology, int rank, const SimulationOptions& options = {});
/// The clock of a simulated process group; an error for any other.
SimulatedClock& simulated_clock();
/// Whether there is a process group: of this thread where it is a rank of its own (`run_ranks_as_threads`), else of the process.
/// Local.
bool is_initialized();
/// The context; an error before `init_process_group`.
ProcessContext& process_context();
/// Leaves the job. Every rank calls it. Until there is a process group again, a new mesh, `DeviceMesh::communicator`, and a save
/// or load of DTensors are errors. Do not use the meshes, communicators and sharded modules of the job any more: they keep their
/// connections until they are destroyed, so that no error says so (PyTorch throws). A store that this process hosts stays until
/// it ends, for a further `init_process_group`.
void destroy_process_group();
/// Writes the last calls of this rank on its communicators (1000, or TESSERA_TRACE_CALLS) to `FOLDER/rank-<rank>.json`, for
/// `tessera-trace`. A missing folder is created, and an older file is replaced. Local, from any thread. An error names the file
/// if it cannot be written. With TESSERA_TRACE_FOLDER this also happens automatically, when a collective fails and on SIGUSR1:
/// docs/running.md.
void write_trace(const std::string& folder);

namespace internal {

/// This rank, as errors name it: 0 where there is no process group.
int rank_for_errors();

} // namespace internal

/// True when CUDA tensors can be used. Loads LibTorch's CUDA libraries where this build has a CUDA side and the process has not
/// loaded them yet. An error where a TESSERA_LOAD_CUDA or TESSERA_CUDA_* means nothing. See docs/cuda.md.
bool cuda_is_available();
/// Throws the reason where `cuda_is_available` is false.
void require_cuda();

} // namespace tessera
