#include <gtest/gtest.h>

#include <tessera/plan/machine.h>

#include <string>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::machine_test {
namespace {

const std::string kHost = R"({"memory_bytes": 80e9, "flops_per_second": {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12},
  "memory_bytes_per_second": 3.35e12)";
std::string host_with(const std::string& more) { return kHost + more + "}"; }

TEST(Machine, IsReadAndWritten) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "machine.json";
  write_text(
      file,
      host_with(
          R"(, "name": "8 x H100", "hosts": 4, "ranks_a_host": 8, "efficiency": 0.7, "attention_efficiency": 0.35, "launch_seconds": 5e-6, "dtensor_seconds": 4e-6,
    "host_memory_bytes": 2e12, "host_bytes_per_second": 5e10, "in_host": {"alpha": 3e-6, "beta": 2.8e-12},
    "between_hosts": {"alpha": 1e-5, "beta": 2.5e-12, "algorithm": "recursive"})"));
  const auto machine = Machine::read(file.string());
  EXPECT_EQ(machine.name, "8 x H100");
  EXPECT_EQ(machine.ranks(), 32);
  EXPECT_EQ(machine.memory, 80'000'000'000);
  EXPECT_EQ(machine.bf16_flops, 989e12);
  EXPECT_EQ(machine.float8_flops, 1979e12);
  EXPECT_EQ(machine.attention_efficiency, 0.35);
  EXPECT_EQ(machine.dtensor_seconds, 4e-6);
  EXPECT_EQ(machine.between_hosts.algorithm, Link::Algorithm::kRecursive);
  EXPECT_EQ(machine.topology().ranks_per_node, 8);
  EXPECT_EQ(machine.topology().in_node.beta, 2.8e-12);
  EXPECT_EQ(Machine::from_json(machine.to_json()).to_json(), machine.to_json());
}

TEST(Machine, HasSoManyRanks) {
  auto machine = Machine::from_json(host_with(R"(, "ranks_a_host": 8, "in_host": {"alpha": 0, "beta": 1e-12})"));
  EXPECT_EQ(machine.with_ranks(4).ranks_a_host, 4);
  EXPECT_EQ(machine.with_ranks(4).hosts, 1);
  EXPECT_EQ(machine.with_ranks(64).hosts, 8);
  EXPECT_THROWS_WITH(machine.with_ranks(12), "12 ranks fill no whole number of hosts of 8");
  EXPECT_THROWS_WITH(machine.with_ranks(0), "0 ranks");
}

TEST(Machine, SaysWhatIsWrong) {
  const auto read = [](const std::string& text) { return Machine::from_json(text, "m.json"); };
  EXPECT_THROWS_WITH(read(R"({"memory_bytes": 1e9, "flops_per_second": {"fp32": 1e9}, "memory_bytes_per_second": 0})"),
                     "m.json: memory_bytes_per_second is 0, but must be positive");
  EXPECT_THROWS_WITH(read(host_with(R"(, "hosts": 2)")), "m.json: there is no \"between_hosts\"");
  EXPECT_THROWS_WITH(read(host_with(R"(, "ranks_a_host": 2)")), "m.json: there is no \"in_host\"");
  EXPECT_THROWS_WITH(read(host_with(R"(, "memory_byte": 3)")), "unknown key \"memory_byte\"; did you mean \"memory_bytes\"?");
  EXPECT_THROWS_WITH(read(host_with(R"(, "in_host": {"alpha": 1, "bet": 1})")), "did you mean \"beta\"?");
  EXPECT_THROWS_WITH(read(host_with(R"(, "in_host": {"alpha": 1})")), "beta");
  EXPECT_THROWS_WITH(read(host_with(R"(, "in_host": {"alpha": -1, "beta": 1})")), "in_host.alpha is -1");
  EXPECT_THROWS_WITH(read(host_with(R"(, "hosts": 1.5)")), "is 1.5, but must be a whole number");
  EXPECT_THROWS_WITH(read(host_with(R"(, "hosts": 0)")), "hosts is 0");
  EXPECT_THROWS_WITH(read(host_with(R"(, "efficiency": 1.5)")), "efficiency is 1.5");
  EXPECT_THROWS_WITH(read(R"({"memory_bytes": 1e9, "flops_per_second": {"fp32": 1e9, "fp8": -1}, "memory_bytes_per_second": 1})"),
                     "m.json: flops_per_second.fp8 is -1");
  EXPECT_THROWS_WITH(read(host_with(R"(, "attention_efficiency": -1)")), "attention_efficiency is -1");
  EXPECT_THROWS_WITH(read(host_with(R"(, "device": "tpu")")), "\"tpu\", but must be \"cpu\" or \"cuda\"");
  EXPECT_THROWS_WITH(read(R"({"flops_per_second": {"fp32": 1e9}, "memory_bytes_per_second": 1})"), "memory_bytes");
  EXPECT_THROWS_WITH(read(R"({"memory_bytes": 1e9, "flops_per_second": {}, "memory_bytes_per_second": 1})"), "fp32");
  EXPECT_THROWS_WITH(read("{"), "m.json");
  EXPECT_THROWS_WITH(read("[]"), "m.json");
  EXPECT_THROWS_WITH(Machine::read("/nowhere/machine.json"), "cannot read /nowhere/machine.json");
}

} // namespace
} // namespace tessera::testing::machine_test
