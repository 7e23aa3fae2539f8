#pragma once

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/sums/block_cache.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "completion_threads.h"
#include "staging.h"

namespace tessera::python {

/// What `torch.distributed` calls: a c10d backend for CPU tensors around a communicator. It offers what ProcessGroupGloo does,
/// but for receives from any rank, and for splitting a group.
///
/// Ranks are those of the group. Tensors may have any strides. Calls return at once but for `monitoredBarrier` and
/// `allreduce_sparse`. Like the communicator's, they are made in the same order on every rank of the group, and after a failure
/// the group cannot be used again.
class CommunicatorBackend final : public c10d::Backend {
 public:
  CommunicatorBackend(CommunicatorPtr communicator, const c10::intrusive_ptr<Options>& options);
  ~CommunicatorBackend() override;
  CommunicatorBackend(const CommunicatorBackend&) = delete;
  CommunicatorBackend& operator=(const CommunicatorBackend&) = delete;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  /// Sums of COO tensors. Blocks.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  /// Messages from one rank to another arrive in the order of the calls: both sides give the same tags in the same order.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override; ///< an error
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  /// A barrier: its error names all ranks that did not come. After a timeout of its own, shorter than the group's, it names none.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

  const std::string getBackendName() const override { return "tessera"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  /// Of later calls. Not above that of the group's making.
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; } ///< how many were made here
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  /// A tensor in memory that the other ranks of this host can read: FSDP2 takes it for its buffers after
  /// `set_allocate_memory_from_process_group_for_comm(True)`. Memory of tensors that died is kept for later ones of like sizes.
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;
  /// Ends the calls in flight with an error, on this rank and, as if it had ended, on the others.
  void abort() override { shutdown(); }
  void shutdown() override;

 private:
  using Start = std::function<Work(Communicator&, Staging&)>;

  static constexpr int kAll = -1;

  /// What `torch.distributed` asks for.
  struct Request {
    c10d::OpType type;
    const char* name;     ///< in profiles, as gloo has it
    at::TensorList shown; ///< the tensors whose shapes a profile has
    Tensors outputs;
    std::chrono::milliseconds timeout;
    int peer = kAll; ///< of a message
  };

  WorkPtr run(Request request, const Start& start);
  /// One for the collectives, and one for each direction to each rank: a message that waits may wait for what follows it.
  std::shared_ptr<CompletionThreads> completion_threads(c10d::OpType type, int peer);
  CommunicatorPtr communicator() const;
  std::string text_of(c10d::OpType type) const;

  const std::string name_; ///< of the group, for errors: of group 0 [0, 1] on rank 1
  const c10::intrusive_ptr<Options> options_;
  mutable std::mutex mutex_;
  CommunicatorPtr communicator_;                               ///< null after shutdown
  std::atomic<std::chrono::milliseconds> timeout_{kNoTimeout}; ///< of later calls, where it is not the communicator's
  std::atomic<uint64_t> calls_{0};
  internal::BlockCache memory_{c10::Device(c10::kCPU)};                                    ///< of `allocateTensor`
  std::map<std::pair<c10d::OpType, int>, std::shared_ptr<CompletionThreads>> completions_; ///< guarded by `mutex_`
};

} // namespace tessera::python
