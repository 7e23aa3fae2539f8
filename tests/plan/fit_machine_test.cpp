#include <gtest/gtest.h>

#include <tessera/plan/fit_machine.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::fit_machine_test {
namespace {

Machine machine() {
  return {.ranks_a_host = 2,
          .device = Machine::Device::kCpu,
          .memory = 1 << 30,
          .fp32_flops = 8e10,
          .bf16_flops = 4e10,
          .float8_flops = 6e10,
          .efficiency = 0.8,
          .attention_efficiency = 0.4,
          .memory_bandwidth = 1e10,
          .launch_seconds = 2e-6,
          .dtensor_seconds = 3e-6,
          .in_host = {.alpha = 1e-5, .beta = 1e-9},
          .between_hosts = {.alpha = 1e-4, .beta = 1e-8, .algorithm = Link::Algorithm::kRecursive}};
}

MeasuredStep step(double compute, double exposed, double seconds) {
  return {.prediction = {.compute = compute, .exposed = exposed}, .seconds = seconds};
}

double compute_factor(const Machine& fitted) {
  return machine().efficiency * machine().fp32_flops / (fitted.efficiency * fitted.fp32_flops);
}

void expect_scaled(const Machine& fitted, double compute, double exposed) {
  const auto before = machine();
  EXPECT_NEAR(compute_factor(fitted), compute, 1e-9);
  EXPECT_NEAR(before.attention_efficiency * before.bf16_flops / (fitted.attention_efficiency * fitted.bf16_flops), compute, 1e-9);
  EXPECT_NEAR(before.efficiency * before.float8_flops / (fitted.efficiency * fitted.float8_flops), compute, 1e-9);
  EXPECT_LE(std::max(fitted.efficiency, fitted.attention_efficiency), 1);
  if (compute > 1) EXPECT_EQ(fitted.fp32_flops, before.fp32_flops) << "the peak, which utilization is measured by";
  EXPECT_EQ(fitted.name, "machine, fitted");
  EXPECT_NEAR(before.memory_bandwidth / fitted.memory_bandwidth, compute, 1e-9);
  EXPECT_NEAR(fitted.launch_seconds / before.launch_seconds, compute, 1e-9);
  EXPECT_NEAR(fitted.dtensor_seconds / before.dtensor_seconds, compute, 1e-9);
  for (const auto link : {&Machine::in_host, &Machine::between_hosts}) {
    EXPECT_NEAR((fitted.*link).alpha / (before.*link).alpha, exposed, 1e-9);
    EXPECT_NEAR((fitted.*link).beta / (before.*link).beta, exposed, 1e-9);
    EXPECT_EQ((fitted.*link).algorithm, (before.*link).algorithm);
  }
  EXPECT_EQ(fitted.memory, before.memory);
  EXPECT_EQ(fitted.host_bandwidth, 0) << "still as the memory's";
}

TEST(FitMachine, FindsTheFactorsOfExactSteps) {
  std::vector<MeasuredStep> steps;
  for (const auto& [compute, exposed] : std::vector<std::pair<double, double>>{{3, 1}, {1, 2}, {0.5, 0.1}})
    steps.push_back(step(compute, exposed, 1.25 * compute + 2 * exposed));
  expect_scaled(fit_machine(machine(), steps), 1.25, 2);
}

TEST(FitMachine, StepsMayBeFasterThanThePeak) {
  expect_scaled(fit_machine(machine(), {step(3, 1, 2)}), 0.5, 0.5);
  expect_scaled(fit_machine(machine(), {step(3, 1, 3.6)}), 0.9, 0.9);
}

TEST(FitMachine, OneStepHasOneFactor) { expect_scaled(fit_machine(machine(), {step(3, 1, 6)}), 1.5, 1.5); }

TEST(FitMachine, StepsThatDoNotTellTheTwoApartHaveOneFactor) {
  expect_scaled(fit_machine(machine(), {step(3, 1, 6), step(6, 2, 12)}), 1.5, 1.5);
  expect_scaled(fit_machine(machine(), {step(3, 0, 6), step(6, 0, 12)}), 2, 2);
  const auto both = fit_machine(machine(), {step(3, 1, 3), step(1, 3, 0.1)}); // the links alone would come out below 0
  EXPECT_GT(both.in_host.beta, 0);
  EXPECT_NEAR(compute_factor(both), both.in_host.beta / machine().in_host.beta, 1e-9);
}

TEST(FitMachine, APredictionOnTheFittedMachineTakesWhatWasMeasured) {
  const auto fitted = fit_machine(machine(), {step(3, 1, 5), step(1, 3, 4)});
  const double compute = compute_factor(fitted), exposed = fitted.in_host.beta / machine().in_host.beta;
  EXPECT_NEAR(3 * compute + exposed, 5, 1e-9);
  EXPECT_NEAR(compute + 3 * exposed, 4, 1e-9);
}

TEST(FitMachine, SaysWhatIsWrong) {
  EXPECT_THROWS_WITH(fit_machine(machine(), {}), "there is no step");
  EXPECT_THROWS_WITH(fit_machine(machine(), {step(1, 1, 0)}), "took 0 seconds, which must be positive");
  EXPECT_THROWS_WITH(fit_machine(machine(), {step(1, 1, std::numeric_limits<double>::quiet_NaN())}), "must be positive");
  EXPECT_THROWS_WITH(fit_machine(machine(), {step(0, 0, 1)}), "0 s of compute and 0 s of waits were predicted");
  EXPECT_THROWS_WITH(fit_machine(machine(), {step(-1, 3, 1)}), "-1 s of compute");
  for (const double seconds : {1e-320, 1e-200, 1e200, 1e308})
    EXPECT_THROWS_WITH(fit_machine(machine(), {step(1, 1, seconds)}), "fit_machine: ");
}

} // namespace
} // namespace tessera::testing::fit_machine_test
