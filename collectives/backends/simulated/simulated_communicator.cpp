#include <tessera/collectives/backends/simulated/simulated_communicator.h>

#include <tessera/collectives/backends/simulated/clock_state.h>
#include <tessera/collectives/calls/checked_communicator.h>

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

/// Calls in `coalesced` start one after another, as without it.
class SimulatedCommunicator final : public CheckedCommunicator {
 public:
  SimulatedCommunicator(CommunicatorPtr fake, ClockPtr clock)
      : CheckedCommunicator(fake->name(), fake->rank_list(), fake->rank(), fake->device_type()),
        fake_(std::move(fake)),
        clock_(std::move(clock)),
        shape_(GroupShape::of(rank_list(), clock_->topology())) {}

 private:
  Work start(CollectiveCall&& call) override {
    auto& clock = clock_->state();
    const ClockState::Pause pause(clock);
    call.issue_on(*fake_);
    const auto end = clock.issue(phases_of(call.kind, call.bytes(), shape_of(call), clock.topology), end_);
    return Work(std::make_shared<SimulatedWork>(clock_, end));
  }

  /// A message is of two ranks alone: its peer's node says which link is used.
  GroupShape shape_of(const CollectiveCall& call) const {
    if (call.kind != CollectiveKind::kSend && call.kind != CollectiveKind::kReceive) return shape_;
    return GroupShape::of({rank_list()[rank()], rank_list()[call.peer]}, clock_->topology());
  }

  CommunicatorPtr fake_;
  ClockPtr clock_;
  GroupShape shape_;
  double end_ = 0; // of the last collective
};

} // namespace

CommunicatorPtr make_simulated_communicator(CommunicatorPtr fake, std::shared_ptr<SimulatedClock> clock) {
  return std::make_shared<SimulatedCommunicator>(std::move(fake), std::move(clock));
}

} // namespace tessera::internal
