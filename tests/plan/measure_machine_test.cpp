#include <gtest/gtest.h>

#include <tessera/plan/machine.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::measure_machine_test {
namespace {

TEST(MeasureMachine, KnowsThisOne) {
  const auto machine =
      measure_machine({.product_size = 32, .operator_bytes = 1 << 16, .repetitions = 3, .message_bytes = 1 << 16});
  machine.check(); // rates and bandwidth are positive
  EXPECT_EQ(machine.ranks(), world_size());
  EXPECT_EQ(machine.device, Machine::Device::kCpu);
  EXPECT_GT(machine.launch_seconds, 0);
  EXPECT_EQ(machine.dtensor_seconds > 0, world_size() > 1);
  EXPECT_EQ(machine.in_host.alpha > 0 || machine.in_host.beta > 0, world_size() > 1);
  EXPECT_EQ(Machine::from_json(machine.to_json()).to_json(), machine.to_json());
}

TEST(MeasureMachine, RefusesSizesOfNothing) {
  EXPECT_THROWS_WITH(measure_machine({.product_size = 0}), "product_size 0");
  EXPECT_THROWS_WITH(measure_machine({.message_bytes = 100}), "message_bytes 100");
}

} // namespace
} // namespace tessera::testing::measure_machine_test
