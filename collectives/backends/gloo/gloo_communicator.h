#pragma once

#include <tessera/collectives/backends/gloo/channel.h>
#include <tessera/collectives/calls/checked_communicator.h>

namespace tessera::internal::gloo {

class Exchange;
struct ExchangePlan;

/// Collectives on CPU tensors over gloo's connections.
///
/// Every collective is one exchange of everybody with everybody, in which the payload goes straight from the input to its place
/// in the output, and a local reduction by the thread that waits. On one host this beats gloo's own algorithms two- to
/// threefold (`collectives_bench`). An all-reduce of long tensors takes two rounds, a reduce-scatter and an all-gather, in
/// segments that overlap. dtypes: all for data movement; real numbers and bool for reductions (bool: sum is or, product is and).
class GlooCommunicator final : public CheckedCommunicator {
 public:
  GlooCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Channel> channel);
  ~GlooCommunicator() override;

  void give_up(std::string_view cause) override;
  void close() override { channel_->leave(); }
  void end() override { channel_->close(); }

 private:
  Work start(CollectiveCall&& call) override;
  std::shared_ptr<Exchange> exchange(const CollectiveCall& call, ExchangePlan plan) const;
  /// What is sent and received in one round.
  ExchangePlan plan(const CollectiveCall& call) const;
  void plan_all_gather(const CollectiveCall& call, ExchangePlan& plan) const;
  void plan_all_to_all(const CollectiveCall& call, ExchangePlan& plan) const;
  void plan_broadcast(const CollectiveCall& call, ExchangePlan& plan) const;
  void reduce_into(const at::Tensor& output, const at::Tensor& input, ReduceOp op, ExchangePlan& plan) const;
  Work all_reduce_in_two_rounds(const CollectiveCall& call) const;
  std::shared_ptr<Exchange> all_reduce_segment(const CollectiveCall& call, const at::Tensor& tensor) const;

  std::shared_ptr<Channel> channel_;
};

} // namespace tessera::internal::gloo
