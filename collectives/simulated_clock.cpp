#include <tessera/collectives/backends/simulated/clock_state.h>
#include <tessera/collectives/simulated_clock.h>

namespace tessera {

SimulatedClock::SimulatedClock(const Topology& topology, const SimulationOptions& options)
    : state_(std::make_unique<internal::ClockState>(topology, options)) {}
SimulatedClock::~SimulatedClock() = default;

SimulatedTime SimulatedClock::elapsed() const { return state_->elapsed(); }
void SimulatedClock::reset() { state_->reset(); }
void SimulatedClock::add_compute(double seconds) { state_->add_compute(seconds); }
double SimulatedClock::flops() const { return state_->flops(); }
const Topology& SimulatedClock::topology() const { return state_->topology; }
const SimulationOptions& SimulatedClock::options() const { return state_->options; }

} // namespace tessera
