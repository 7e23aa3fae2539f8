#include <tessera/plan/fit_machine.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {

namespace {

/// Factors of a machine's times.
struct Factors {
  double compute = 1, exposed = 1;
  bool are_positive() const { return compute > 0 && exposed > 0; }
};

/// The sums of the normal equations, of relative times: what was predicted over what was measured.
struct Sums {
  double compute = 0, exposed = 0; // of each
  double compute_squared = 0, exposed_squared = 0, mixed = 0;
};

Sums sums_of(const std::vector<MeasuredStep>& steps) {
  Sums sums;
  for (const auto& step : steps) {
    const double compute = step.prediction.compute / step.seconds, exposed = step.prediction.exposed / step.seconds;
    sums.compute += compute;
    sums.exposed += exposed;
    sums.compute_squared += compute * compute;
    sums.exposed_squared += exposed * exposed;
    sums.mixed += compute * exposed;
  }
  return sums;
}

Factors one_factor(const Sums& sums) {
  const double squared = sums.compute_squared + sums.exposed_squared + 2 * sums.mixed;
  const double factor = (sums.compute + sums.exposed) / squared;
  return {factor, factor};
}

Factors factors_of(const Sums& sums) {
  constexpr double kTold = 1e-6; // of the largest that the determinant can be
  const double largest = sums.compute_squared * sums.exposed_squared;
  const double determinant = largest - sums.mixed * sums.mixed;
  if (determinant <= kTold * largest) return one_factor(sums);
  const Factors both{(sums.compute * sums.exposed_squared - sums.exposed * sums.mixed) / determinant,
                     (sums.exposed * sums.compute_squared - sums.compute * sums.mixed) / determinant};
  return both.are_positive() ? both : one_factor(sums);
}

/// The share of the peak changes, which is at most 1. So the peak stays what utilization is measured by, unless steps go beyond
/// it.
void scale_rates(Machine& machine, double factor) {
  const double peak = std::max(1.0, factor * std::max(machine.efficiency, machine.attention_efficiency));
  machine.efficiency *= factor / peak;
  machine.attention_efficiency *= factor / peak;
  machine.fp32_flops *= peak;
  machine.bf16_flops *= peak;
  machine.float8_flops *= peak;
}

Link scaled(Link link, double factor) {
  link.alpha *= factor;
  link.beta *= factor;
  return link;
}

} // namespace

Machine fit_machine(const Machine& machine, const std::vector<MeasuredStep>& steps) {
  TORCH_CHECK_VALUE(!steps.empty(), "fit_machine: there is no step");
  for (const auto& step : steps) {
    TORCH_CHECK_VALUE(std::isfinite(step.seconds) && step.seconds > 0, "fit_machine: the step of ",
                      step.prediction.settings.to_string(), " took ", step.seconds, " seconds, which must be positive");
    const auto [compute, exposed] = std::pair(step.prediction.compute, step.prediction.exposed);
    TORCH_CHECK_VALUE(std::isfinite(compute) && std::isfinite(exposed) && compute >= 0 && exposed >= 0 && compute + exposed > 0,
                      "fit_machine: of the step of ", step.prediction.settings.to_string(), " ", compute, " s of compute and ",
                      exposed, " s of waits were predicted, which are no times of a step");
  }
  const auto factors = factors_of(sums_of(steps));
  auto fitted = machine;
  scale_rates(fitted, 1 / factors.compute);
  fitted.name += ", fitted";
  fitted.memory_bandwidth /= factors.compute;
  fitted.host_bandwidth /= factors.compute;
  fitted.launch_seconds *= factors.compute;
  fitted.dtensor_seconds *= factors.compute;
  fitted.in_host = scaled(machine.in_host, factors.exposed);
  fitted.between_hosts = scaled(machine.between_hosts, factors.exposed);
  fitted.check("fit_machine"); // seconds that are not of this world
  return fitted;
}

} // namespace tessera
