#pragma once

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/simulated_clock.h>

#include <memory>

namespace tessera::internal {

/// A fake communicator (fake.h) whose collectives take the time that the clock's topology gives them.
CommunicatorPtr make_simulated_communicator(CommunicatorPtr fake, std::shared_ptr<SimulatedClock> clock);

} // namespace tessera::internal
