#pragma once

#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/gloo/channel.h>

namespace tessera::internal::gloo {

class Exchange;
struct ExchangePlan;

/// Collectives on CPU tensors over gloo's connections.
///
/// Every collective is one exchange of everybody with everybody, in which the payload goes straight from the input to its place
/// in the output, and a local reduction by the thread that waits. On one host this beats gloo's own algorithms two- to
/// threefold (`collectives_bench`). An all-reduce of long tensors takes two rounds, a reduce-scatter and an all-gather, in
/// segments that overlap. dtypes: all for data movement; real numbers and bool for reductions (bool: sum is or, product is and).
class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Channel> channel);
  ~GlooCommunicator() override;

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override;
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override;
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override;
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override;
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override;
  Work send(const at::Tensor& tensor, int to, std::string_view label) override;
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override;
  Work coalesced(const std::function<void()>& issue) override;
  void give_up(std::string_view cause) override;
  void close() override { channel_->close(); }
  void barrier(std::string_view label) override;

 private:
  struct Call;
  std::shared_ptr<Exchange> start(const Call& call, ExchangePlan plan);
  Work finish_call(const Call& call, std::vector<std::shared_ptr<Exchange>> exchanges);
  Work run(const Call& call, ExchangePlan plan);
  Work run_between(CollectiveKind kind, Direction direction, const at::Tensor& tensor, std::string_view label);
  void reduce_into(const at::Tensor& output, const at::Tensor& input, ReduceOp op, ExchangePlan& plan);
  Work all_reduce_in_two_rounds(const Call& call, const at::Tensor& tensor, ReduceOp op);
  std::shared_ptr<Exchange> all_reduce_segment(const Call& call, const at::Tensor& tensor, ReduceOp op);

  std::shared_ptr<Channel> channel_;
  CoalescedCalls coalesced_;
};

} // namespace tessera::internal::gloo
