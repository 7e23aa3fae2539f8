#pragma once

#include <tessera/collectives/call_communicator.h>
#include <tessera/collectives/coalesced_calls.h>

#include <functional>

namespace tessera::internal {

/// Checks the arguments of each call, counts it and notes it for `coalesced`. So a backend has only to start it.
class CheckedCommunicator : public CallCommunicator {
 public:
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }

 protected:
  using CallCommunicator::CallCommunicator;

  /// Starts a call that has passed `check`. What throws here is not counted.
  virtual Work start(CollectiveCall call) = 0;

 private:
  Work run(CollectiveCall call) final;

  CoalescedCalls coalesced_;
};

} // namespace tessera::internal
