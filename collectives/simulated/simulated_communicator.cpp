#include <tessera/collectives/simulated/simulated_communicator.h>

#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/simulated/clock_state.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace tessera::internal {

namespace {

using ClockPtr = std::shared_ptr<SimulatedClock>;

class SimulatedWork final : public WorkState {
 public:
  SimulatedWork(ClockPtr clock, double end) : clock_(std::move(clock)), end_(end) {}
  void wait() override { clock_->state().wait_until(end_); }
  bool is_completed() override { return clock_->state().is_over(end_); }

 private:
  ClockPtr clock_;
  double end_;
};

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(CommunicatorPtr fake, ClockPtr clock)
      : Communicator(fake->name(), fake->rank_list(), fake->rank(), fake->device_type()),
        fake_(std::move(fake)),
        clock_(std::move(clock)),
        shape_(GroupShape::of(rank_list(), clock_->topology())) {}

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    return run(CollectiveKind::kAllGather, bytes_of(output), [&] { return fake_->all_gather_into(output, input, label); });
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    return run(CollectiveKind::kReduceScatter, bytes_of(input), [&] { return fake_->reduce_scatter(output, input, op, label); });
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    return run(CollectiveKind::kAllReduce, bytes_of(tensor), [&] { return fake_->all_reduce(tensor, op, label); });
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    return run(CollectiveKind::kAllToAll, std::max(bytes_of(output), bytes_of(input)),
               [&] { return fake_->all_to_all(output, input, output_splits, input_splits, label); });
  }
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    return run(CollectiveKind::kBroadcast, bytes_of(tensor), [&] { return fake_->broadcast(tensor, root, label); });
  }
  Work send(const at::Tensor& tensor, int to, std::string_view label) override {
    return run(
        CollectiveKind::kSend, bytes_of(tensor), [&] { return fake_->send(tensor, to, label); }, to);
  }
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override {
    return run(
        CollectiveKind::kReceive, bytes_of(tensor), [&] { return fake_->receive(tensor, from, label); }, from);
  }
  /// They start one after another, as without it.
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }
  void barrier(std::string_view label) override {
    run(CollectiveKind::kBarrier, 0, [&] {
      fake_->barrier(label);
      return Work();
    }).wait();
  }
  CollectiveCounters& counters() override { return fake_->counters(); }

 private:
  static int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

  /// Of all ranks, or with `peer` alone: then that one's node says which link is used.
  template <typename Call>
  Work run(CollectiveKind kind, int64_t bytes, const Call& call, std::optional<int> peer = {}) {
    auto& clock = clock_->state();
    const ClockState::Pause pause(clock);
    call();
    const auto shape = peer ? GroupShape::of({rank_list()[rank()], rank_list()[*peer]}, clock.topology) : shape_;
    const auto end = clock.issue(phases_of(kind, bytes, shape, clock.topology), end_);
    return coalesced_.note(Work(std::make_shared<SimulatedWork>(clock_, end)));
  }

  CommunicatorPtr fake_;
  ClockPtr clock_;
  GroupShape shape_;
  CoalescedCalls coalesced_;
  double end_ = 0; // of the last collective
};

} // namespace

CommunicatorPtr make_simulated_communicator(CommunicatorPtr fake, std::shared_ptr<SimulatedClock> clock) {
  return std::make_shared<SimulatedCommunicator>(std::move(fake), std::move(clock));
}

} // namespace tessera::internal
