#include <tessera/plan/fit_machine.h>

#include <c10/util/Exception.h>

#include <cmath>

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
    TORCH_CHECK_VALUE(step.prediction.compute + step.prediction.exposed > 0, "fit_machine: nothing was predicted of the step of ",
                      step.prediction.settings.to_string());
  }
  const auto factors = factors_of(sums_of(steps));
  auto fitted = machine;
  fitted.fp32_flops /= factors.compute;
  fitted.bf16_flops /= factors.compute;
  fitted.memory_bandwidth /= factors.compute;
  fitted.host_bandwidth /= factors.compute;
  fitted.launch_seconds *= factors.compute;
  fitted.in_host = scaled(machine.in_host, factors.exposed);
  fitted.between_hosts = scaled(machine.between_hosts, factors.exposed);
  return fitted;
}

} // namespace tessera
