#include <tessera/collectives/backends/simulated/clock_state.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera::internal {

double WireTimes::carry(double from, double seconds, double now) {
  while (!busy_.empty() && busy_.begin()->second <= now) busy_.erase(busy_.begin());
  if (seconds <= 0) return from;
  for (const auto& [begin, end] : busy_) {
    if (from + seconds <= begin) break;
    from = std::max(from, end);
  }
  busy_.emplace(from, from + seconds);
  return from + seconds;
}

ClockState::ClockState(const Topology& where, const SimulationOptions& how) : topology(where), options(how) {
  topology.check();
  const auto check = [](const std::optional<double>& rate, const char* name) {
    TORCH_CHECK_VALUE(!rate || (std::isfinite(*rate) && *rate > 0), "simulated rank: ", name, " is ", rate.value_or(0),
                      ", but must be positive");
  };
  check(options.flops_per_second, "flops_per_second");
  check(options.attention_flops_per_second, "attention_flops_per_second");
  check(options.float8_flops_per_second, "float8_flops_per_second");
  check(options.bytes_per_second, "bytes_per_second");
  check(options.host_bytes_per_second, "host_bytes_per_second");
  for (const auto& [value, name] :
       {std::pair(options.launch_seconds, "launch_seconds"), std::pair(options.dtensor_seconds, "dtensor_seconds")})
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, "simulated rank: ", name, " is ", value,
                      ", but must be a time, in seconds");
  TORCH_CHECK_VALUE(options.flops_per_second || !options.bytes_per_second,
                    "simulated rank: bytes_per_second is given without flops_per_second");
  for (const auto& [rate, name] : {std::pair(options.attention_flops_per_second, "attention_flops_per_second"),
                                   std::pair(options.float8_flops_per_second, "float8_flops_per_second")})
    TORCH_CHECK_VALUE(options.flops_per_second || !rate, "simulated rank: ", name, " is given without flops_per_second");
  TORCH_CHECK_VALUE(options.bytes_per_second || options.launch_seconds + options.dtensor_seconds == 0,
                    "simulated rank: launch_seconds or dtensor_seconds is given without bytes_per_second");
}

void ClockState::take_compute() {
  double seconds = 0;
  if (options.flops_per_second) {
    seconds = std::exchange(untaken_seconds_, 0);
  } else {
    const auto now = Clock::now();
    seconds = std::chrono::duration<double>(now - std::exchange(mark_, now)).count();
  }
  time_.compute += seconds;
  time_.total += seconds;
}

void ClockState::begin_pause() {
  const std::lock_guard lock(mutex_);
  take_compute();
}

void ClockState::end_pause() {
  const std::lock_guard lock(mutex_);
  mark_ = Clock::now();
}

double ClockState::issue(const std::vector<Phase>& phases, double& stream) {
  const std::lock_guard lock(mutex_);
  if (!options.overlaps) return stream = carry_alone(phases);
  const double begin = std::max(time_.total, stream);
  double end = begin;
  for (const auto& phase : phases)
    end = wires_[static_cast<size_t>(phase.wire)].carry(end + phase.latency, phase.transfer, time_.total);
  time_.communication += end - begin;
  return stream = end;
}

/// The rank carries the bytes itself.
double ClockState::carry_alone(const std::vector<Phase>& phases) {
  take_compute();
  double seconds = 0;
  for (const auto& phase : phases) seconds += phase.latency + phase.transfer;
  time_.communication += seconds;
  time_.exposed += seconds;
  return time_.total += seconds;
}

void ClockState::wait_until(double end) {
  const std::lock_guard lock(mutex_);
  take_compute();
  if (end <= time_.total) return;
  time_.exposed += end - time_.total;
  time_.total = end;
}

bool ClockState::is_over(double end) {
  const std::lock_guard lock(mutex_);
  take_compute();
  return end <= time_.total;
}

double ClockState::seconds_of(const OperatorWork& work) const {
  const double rate = *options.flops_per_second;
  const double own_rate = work.is_attention ? options.attention_flops_per_second.value_or(rate)
                          : work.is_float8  ? options.float8_flops_per_second.value_or(rate)
                                            : rate;
  const double products = work.flops / own_rate;
  if (!options.bytes_per_second) return products;
  return options.launch_seconds + std::max(products, work.bytes / *options.bytes_per_second);
}

void ClockState::count_operator(const OperatorWork& work) {
  const std::lock_guard lock(mutex_);
  if (!options.flops_per_second) return;
  flops_ += work.flops;
  untaken_seconds_ += work.is_on_parts ? options.dtensor_seconds : seconds_of(work);
}

void ClockState::add_compute(double seconds) {
  TORCH_CHECK_VALUE(std::isfinite(seconds) && seconds >= 0, "SimulatedClock::add_compute: ", seconds, " is no time in seconds");
  const std::lock_guard lock(mutex_);
  time_.compute += seconds;
  time_.total += seconds;
}

SimulatedTime ClockState::elapsed() {
  const std::lock_guard lock(mutex_);
  take_compute();
  return {time_.total - before_.total, time_.compute - before_.compute, time_.exposed - before_.exposed,
          time_.communication - before_.communication};
}

double ClockState::flops() {
  const std::lock_guard lock(mutex_);
  take_compute();
  return flops_;
}

void ClockState::reset() {
  const std::lock_guard lock(mutex_);
  take_compute();
  before_ = time_;
  flops_ = 0;
}

} // namespace tessera::internal
