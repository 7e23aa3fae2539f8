#pragma once

#include <tessera/collectives/calls/call_communicator.h>
#include <tessera/collectives/calls/coalesced_calls.h>
#include <tessera/collectives/calls/collective_event.h>

#include <functional>

namespace tessera::internal {

/// Checks the arguments of each call, counts it, shows it to a profiler and notes it for `coalesced`. So a backend has only to
/// start it.
class CheckedCommunicator : public CallCommunicator {
 public:
  Work run(CollectiveCall&& call) final;
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }

 protected:
  using CallCommunicator::CallCommunicator;

  /// Starts a call that has passed `check`, and may take what it holds. What throws here is not counted.
  virtual Work start(CollectiveCall&& call) = 0;

 private:
  Work start_in_event(at::StepCallbacks&& observers, CollectiveCall&& call);

  CoalescedCalls coalesced_;
};

} // namespace tessera::internal
