#include <tessera/collectives/backends/thread_ranks/thread_communicator.h>

#include <tessera/collectives/calls/checked_communicator.h>
#include <tessera/collectives/calls/checks.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal {

namespace {

class ThreadCommunicator final : public CheckedCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, std::string name, RankList ranks, int rank)
      : CheckedCommunicator(std::move(name), std::move(ranks), rank, at::kCPU), meeting_(std::move(meeting)) {}
  void close() override { meeting_->leave(rank()); }

 private:
  Work start(CollectiveCall&& call) override {
    Contribution own{.signature = call.signature(),
                     .output = call.output,
                     .input = call.input,
                     .splits = std::move(call.splits),
                     .text = describe(*this, call)};
    if (call.kind == CollectiveKind::kSend) return meeting_->come(rank(), call.peer, rank(), std::move(own));
    if (call.kind == CollectiveKind::kReceive) return meeting_->come(call.peer, rank(), rank(), std::move(own));
    return meeting_->come(rank(), std::move(own));
  }

  std::shared_ptr<Meeting> meeting_;
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
