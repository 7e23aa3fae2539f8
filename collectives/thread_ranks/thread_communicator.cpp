#include <tessera/collectives/thread_ranks/thread_communicator.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/coalesced_calls.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal {

namespace {

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, std::string name, RankList ranks, int rank)
      : Communicator(std::move(name), std::move(ranks), rank, at::kCPU), meeting_(std::move(meeting)) {}

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    check_all_gather(*this, output, input, label);
    return run(CollectiveKind::kAllGather, label,
               {.signature = sign(CollectiveKind::kAllGather, output, label), .output = output, .input = input});
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    check_reduce_scatter(*this, output, input, op, label);
    return run(CollectiveKind::kReduceScatter, label,
               {.signature = sign(CollectiveKind::kReduceScatter, input, label, op), .output = output, .input = input});
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    check_all_reduce(*this, tensor, op, label);
    return run(CollectiveKind::kAllReduce, label,
               {.signature = sign(CollectiveKind::kAllReduce, tensor, label, op), .output = tensor});
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    auto splits = check_all_to_all(*this, output, input, output_splits, input_splits, label);
    const auto& larger = output.nbytes() > input.nbytes() ? output : input;
    return run(CollectiveKind::kAllToAll, label,
               {.signature = sign(CollectiveKind::kAllToAll, larger, label),
                .output = output,
                .input = input,
                .splits = std::move(splits)});
  }
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    check_broadcast(*this, tensor, root, label);
    return run(CollectiveKind::kBroadcast, label,
               {.signature = sign(CollectiveKind::kBroadcast, tensor, label, ReduceOp::kSum, root), .output = tensor});
  }
  Work send(const at::Tensor& tensor, int to, std::string_view label) override {
    check_send(*this, tensor, to, label);
    return message(CollectiveKind::kSend, rank(), to, label,
                   {.signature = sign(CollectiveKind::kSend, tensor, label), .input = tensor});
  }
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override {
    check_receive(*this, tensor, from, label);
    return message(CollectiveKind::kReceive, from, rank(), label,
                   {.signature = sign(CollectiveKind::kReceive, tensor, label), .output = tensor});
  }
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }
  void barrier(std::string_view label) override {
    run(CollectiveKind::kBarrier, label, {.signature = make_signature(CollectiveKind::kBarrier, label, at::kByte, 0)}).wait();
  }

 private:
  Signature sign(CollectiveKind kind, const at::Tensor& larger, std::string_view label, ReduceOp op = ReduceOp::kSum,
                 int root = -1) {
    const auto bytes = static_cast<int64_t>(larger.nbytes());
    counters_.add(kind, bytes);
    return make_signature(kind, label, larger.scalar_type(), bytes, op, root);
  }
  Work run(CollectiveKind kind, std::string_view label, Contribution contribution) {
    if (kind == CollectiveKind::kBarrier) counters_.add(kind, 0);
    contribution.text = describe(*this, kind, label);
    return coalesced_.note(meeting_->come(rank(), std::move(contribution)));
  }
  Work message(CollectiveKind kind, int from, int to, std::string_view label, Contribution contribution) {
    contribution.text = describe(*this, kind, label);
    return coalesced_.note(meeting_->come(from, to, rank(), std::move(contribution)));
  }
  std::shared_ptr<Meeting> meeting_;
  CoalescedCalls coalesced_;
};

} // namespace

CommunicatorPtr make_thread_communicator(Meetings& meetings, std::string name, RankList ranks, int rank,
                                         at::DeviceType device_type) {
  TORCH_CHECK(device_type == at::kCPU, "ranks in threads exchange CPU tensors, and none on ",
              c10::DeviceTypeName(device_type, true));
  auto meeting = meetings.of(ranks, name);
  return std::make_shared<ThreadCommunicator>(std::move(meeting), std::move(name), std::move(ranks), rank);
}

} // namespace tessera::internal
