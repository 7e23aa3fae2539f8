#include <tessera/collectives/calls/checked_communicator.h>

#include <tessera/collectives/calls/checks.h>

#include <c10/util/ScopeExit.h>

#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

/// Ends the event of a call with its wait, or where it is seen to be over.
class WorkInEvent final : public WorkState {
 public:
  WorkInEvent(Work work, CollectiveEvent::Ptr event) : work_(std::move(work)), event_(std::move(event)) {}

  void wait() override {
    const auto end = c10::make_scope_exit([this] { event_->end(); });
    auto work = work_; // a copy, because `wait` resets the handle and other threads read this one
    work.wait();
  }
  bool is_completed() override {
    if (!work_.is_completed()) return false;
    event_->end();
    return true;
  }
  bool blocks_host() const override { return work_.blocks_host(); }

 private:
  const Work work_;
  const CollectiveEvent::Ptr event_;
};

/// None for a barrier.
c10::ArrayRef<at::Tensor> sent_tensor(const CollectiveCall& call) {
  if (call.input.defined()) return call.input;
  return call.output.defined() ? c10::ArrayRef<at::Tensor>(call.output) : c10::ArrayRef<at::Tensor>();
}

} // namespace

Work CheckedCommunicator::run(CollectiveCall&& call) {
  check(*this, call);
  const auto kind = call.kind;
  const auto bytes = call.bytes();
  auto observers = CollectiveEvent::observers();
  const CollectiveEvent::Parts parts;
  auto work = observers ? start_in_event(std::move(*observers), std::move(call)) : start(std::move(call));
  counters_.add(kind, bytes);
  return coalesced_.note(std::move(work));
}

/// The event of a call that is over at once, or goes on only on the device, ends here: what the device does has its own.
Work CheckedCommunicator::start_in_event(at::StepCallbacks&& observers, CollectiveCall&& call) {
  const auto event = std::make_shared<CollectiveEvent>(std::move(observers), to_string(call.kind), sent_tensor(call));
  auto work = start(std::move(call));
  return work.blocks_host() ? Work(std::make_shared<WorkInEvent>(std::move(work), event)) : work;
}

} // namespace tessera::internal
