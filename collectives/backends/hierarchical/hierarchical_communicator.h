#pragma once

#include <tessera/collectives/backends/hierarchical/call.h>
#include <tessera/collectives/backends/hierarchical/links.h>
#include <tessera/collectives/backends/hierarchical/steps.h>
#include <tessera/collectives/backends/staged/task_thread.h>
#include <tessera/collectives/calls/checked_communicator.h>

#include <functional>
#include <memory>

namespace tessera::internal::hierarchical {

/// Collectives on CPU tensors of ranks that lie on several hosts, equally many on each.
///
/// What is gathered, reduced or broadcast goes once over the link to each host, where gloo alone would send it to each rank
/// there: the ranks of a host share the rest through its memory (`steps.h`). A thread takes the steps, call after call. An
/// all-to-all and a barrier gain nothing by that and small tensors little: they go over gloo, and so do messages to another host.
/// Sums of bf16 and fp16 are rounded once on each host and once between the hosts. dtypes: as `GlooCommunicator`.
class HierarchicalCommunicator final : public CheckedCommunicator {
 public:
  /// `inside`: of this host's ranks, by column, over the same engine as `links`.
  HierarchicalCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<const Links> links,
                           CommunicatorPtr inside);
  ~HierarchicalCommunicator() override;

  void give_up(std::string_view cause) override;
  void close() override { links_->leave(); }
  void end() override { links_->close(); }
  c10::DataPtr allocate(int64_t bytes) override;

 private:
  using Steps = std::function<void(Call&)>;
  Work start(CollectiveCall&& call) override;
  Work take_steps(const CollectiveCall& call);
  Steps steps_of(const CollectiveCall& call);

  std::shared_ptr<const Links> links_;
  CommunicatorPtr flat_, inside_; ///< of all ranks over gloo, and of this host's
  Staging staging_;
  std::unique_ptr<TaskThread> thread_; // ends first
};

} // namespace tessera::internal::hierarchical
