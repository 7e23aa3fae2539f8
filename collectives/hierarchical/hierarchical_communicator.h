#pragma once

#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/hierarchical/call.h>
#include <tessera/collectives/hierarchical/links.h>
#include <tessera/collectives/hierarchical/steps.h>
#include <tessera/collectives/staged/task_thread.h>

#include <functional>
#include <memory>

namespace tessera::internal::hierarchical {

/// Collectives on CPU tensors of ranks that lie on several hosts, equally many on each.
///
/// What is gathered, reduced or broadcast goes once over the link to each host, where gloo alone would send it to each rank
/// there: the ranks of a host share the rest through its memory (`steps.h`). A thread takes the steps, call after call. An
/// all-to-all and a barrier gain nothing by that and small tensors little: they go over gloo, and so do messages to another host.
/// Sums of bf16 and fp16 are rounded once on each host and once between the hosts. dtypes: as `GlooCommunicator`.
class HierarchicalCommunicator final : public Communicator {
 public:
  /// `inside`: of this host's ranks, by column, over the same engine as `links`.
  HierarchicalCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<const Links> links,
                           CommunicatorPtr inside);
  ~HierarchicalCommunicator() override;

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override;
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override;
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override;
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override;
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override;
  Work send(const at::Tensor& tensor, int to, std::string_view label) override;
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override;
  Work coalesced(const std::function<void()>& issue) override;
  void barrier(std::string_view label) override;
  void give_up(std::string_view cause) override;
  void close() override { links_->close(); }
  c10::DataPtr allocate(int64_t bytes) override;

 private:
  using Steps = std::function<void(Call&)>;
  Work note(CollectiveKind kind, int64_t bytes, Work work); ///< counts what has started
  Work start(Signature signature, std::string_view label, std::vector<at::Tensor> tensors, Steps steps);

  std::shared_ptr<const Links> links_;
  CommunicatorPtr flat_, inside_; ///< of all ranks over gloo, and of this host's
  Staging staging_;
  CoalescedCalls coalesced_;
  std::unique_ptr<TaskThread> thread_; // ends first
};

} // namespace tessera::internal::hierarchical
