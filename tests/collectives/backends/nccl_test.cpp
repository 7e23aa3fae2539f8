// The NCCL side, up to the error that there is no device: loaded, asked, and named in what all ranks throw.
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/scoped_environment.h>
#include <tessera/tests/support/world.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/backends/nccl/device_agreement.h>
#include <tessera/collectives/backends/nccl/plugin.h>

#include <dlfcn.h>
#include <array>
#include <numeric>

namespace tessera::testing::nccl_test {
namespace {

using internal::nccl::DeviceAnswer;
using internal::nccl::SharedDevices;

std::vector<int64_t> everyone() {
  std::vector<int64_t> ranks(world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// The error of an agreement of all ranks, each with its own answer.
std::string agreement_error(const std::string& name, const DeviceAnswer& own, SharedDevices shared) {
  auto& context = process_context();
  internal::GroupDescription group;
  group.ranks = everyone();
  group.rank = context.rank();
  group.options.timeout = context.options().timeout;
  group.watch = std::make_shared<internal::RankWatch>(group.rank, std::vector<std::string>(group.ranks.size()), context.store(),
                                                      context.store());
  group.store = c10::make_intrusive<internal::GroupStore>(name, context.store(), group.ranks, group.watch);
  return error_of([&] { internal::nccl::agree_on_devices(group, own, shared); });
}

TEST(CudaDevice, IsTheOneOfTheEnvironmentTheOnlyOneOrTheLocalRanks) {
  using internal::nccl::device_index;
  EXPECT_EQ(device_index("", 0, 1), 0);
  EXPECT_EQ(device_index("", 3, 1), 0); // each process sees its own
  EXPECT_EQ(device_index("", 3, 4), 3);
  EXPECT_EQ(device_index("2", 0, 4), 2);
  EXPECT_EQ(device_index("0", 3, 4), 0);
  EXPECT_THROWS_WITH(device_index("", 2, 2),
                     "the process 2 on its host and needs CUDA device 2, but there are 2 (TESSERA_CUDA_DEVICE");
  for (const auto* bad : {"4", "-1", "first", "1.5"}) {
    EXPECT_THROWS_WITH(device_index(bad, 0, 4),
                       c10::str("environment variable TESSERA_CUDA_DEVICE=", bad, " must be a device's index in [0, 4)"));
  }
}

TEST(CudaDevice, RanksWithDevicesOfTheirOwnAgree) {
  const DeviceAnswer own{c10::str("GPU ", world_rank()), ""};
  EXPECT_EQ(agreement_error("own", own, SharedDevices::kRefused), "no error");
}

TEST(CudaDevice, TwoRanksOnOneAreNamedByAllUnlessThatIsAllowed) {
  const DeviceAnswer first{c10::str("GPU ", world_rank() == last_rank() ? 0 : world_rank()), ""};
  const auto expected =
      world_size() == 1 ? "no error" : c10::str("ranks 0 and ", last_rank(), " use the same CUDA device (GPU 0), ");
  EXPECT_THAT(agreement_error("shared", first, SharedDevices::kRefused), ::testing::HasSubstr(expected));
  EXPECT_EQ(agreement_error("allowed", first, SharedDevices::kAllowed), "no error");
}

TEST(CudaDevice, ARankWithoutOneIsNamedByAll) {
  const bool has = world_rank() != last_rank();
  const DeviceAnswer own{has ? c10::str("GPU ", world_rank()) : "", has ? "" : "it is in the other machine"};
  EXPECT_THAT(agreement_error("none", own, SharedDevices::kRefused),
              ::testing::HasSubstr(c10::str("rank ", last_rank(), " cannot use CUDA: it is in the other machine")));
}

TEST(Nccl, IsLoadedAndMissesTheDevice) {
  if (cuda_is_available()) GTEST_SKIP() << "needs a machine without CUDA";
  EXPECT_THROWS_WITH(require_cuda(), "no CUDA device: ");
  EXPECT_THROWS_WITH(internal::nccl::choose_device(0), "no CUDA device: ");
}

TEST(Nccl, OfAnotherBuildIsRefused) {
  using internal::nccl::GetCudaSide, internal::nccl::Interface;
  static_cast<void>(cuda_is_available()); // loads it
  auto* const get = reinterpret_cast<GetCudaSide*>(dlsym(RTLD_DEFAULT, internal::nccl::kGetCudaSideName));
  ASSERT_NE(get, nullptr);
  EXPECT_NE(get({}), nullptr);
  EXPECT_EQ(get({.version = Interface().version - 1}), nullptr);
  EXPECT_EQ(get({.communicator = sizeof(Communicator) + 8}), nullptr);
}

/// Before it is known whether there is a device: or a program that asks would go on without one.
TEST(Nccl, ASettingThatMeansNothingIsNamedWhereCudaIsAskedFor) {
  const std::vector<std::array<const char*, 3>> settings{{"TESSERA_LOAD_CUDA", "off", "0 or 1"},
                                                         {"TESSERA_CUDA_DEVICE", "-1", "a device's index, from 0 on"},
                                                         {"TESSERA_CUDA_DEVICE", "gpu0", "a device's index, from 0 on"},
                                                         {"TESSERA_CUDA_COLLECTIVES", "gloo", "nccl or staged"},
                                                         {"TESSERA_CUDA_BUFFERS", "pinned", "caching or registered"}};
  for (const auto& [name, value, values] : settings) {
    const ScopedEnvironment setting(name, value);
    const auto expected = c10::str("environment variable ", name, "=", value, " must be ", values);
    EXPECT_THROWS_WITH(require_cuda(), expected);
    EXPECT_THROWS_WITH(cuda_is_available(), expected);
  }
}

TEST(Nccl, AGroupNamesTheRankWithoutADevice) {
  if (world_size() == 1 || cuda_is_available()) GTEST_SKIP() << "needs ranks on a machine without CUDA";
  EXPECT_THROWS_WITH(process_context().communicator(everyone(), at::kCUDA),
                     c10::str("rank ", world_rank(), " cannot connect group "));
  EXPECT_THROWS_WITH(process_context().communicator(everyone(), at::kCUDA, "again"), "rank 0 cannot use CUDA: no CUDA device: ");
}

TEST(Nccl, ASettingThatMeansNothingIsNamedByAll) {
  if (world_size() == 1) GTEST_SKIP() << "a group of one rank needs no communicator";
  const auto error_with = [](const char* variable, const char* value, const char* purpose) {
    const ScopedEnvironment setting(variable, value);
    return error_of([&] { process_context().communicator(everyone(), at::kCUDA, purpose); });
  };
  EXPECT_THAT(error_with("TESSERA_CUDA_COLLECTIVES", "gloo", "bad collectives"),
              ::testing::HasSubstr("environment variable TESSERA_CUDA_COLLECTIVES=gloo must be nccl or staged"));
  EXPECT_THAT(error_with("TESSERA_CUDA_BUFFERS", world_rank() == 0 ? "pinned" : "", "bad buffers"),
              ::testing::HasSubstr("environment variable TESSERA_CUDA_BUFFERS=pinned must be caching or registered"));
}

} // namespace
} // namespace tessera::testing::nccl_test
