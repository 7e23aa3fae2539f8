#include <tessera/collectives/checked_communicator.h>

#include <tessera/collectives/checks.h>

#include <utility>

namespace tessera::internal {

Work CheckedCommunicator::run(CollectiveCall call) {
  check(*this, call);
  const auto kind = call.kind;
  const auto bytes = call.bytes();
  auto work = start(std::move(call));
  counters_.add(kind, bytes);
  return coalesced_.note(std::move(work));
}

} // namespace tessera::internal
