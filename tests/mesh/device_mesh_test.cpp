#include "../support/matchers.h"
#include "../support/world.h"

#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

namespace tessera::device_mesh_test {
namespace {

using Names = std::vector<std::string>;
using Dims = std::vector<int64_t>;
using testing::world_rank;
using testing::world_size;

TEST(DeviceMesh, OneDimOverTheWorld) {
  auto mesh = init_device_mesh(at::kCPU, {world_size()}, {"shard"});
  EXPECT_EQ(mesh.ndim(), 1);
  EXPECT_EQ(mesh.size(), world_size());
  EXPECT_EQ(mesh.size(0), world_size());
  EXPECT_EQ(mesh.local_rank(), world_rank());
  EXPECT_EQ(mesh.local_rank("shard"), world_rank());
  EXPECT_EQ(*mesh.coordinate(), Dims{world_rank()});
  EXPECT_EQ(mesh.device(), at::Device(at::kCPU));
  EXPECT_EQ(mesh.communicator()->ranks(), mesh.ranks());
}

TEST(DeviceMesh, DimsSlicesAndGroupsOfTwoDims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
  EXPECT_EQ(mesh.to_string(), "DeviceMesh(cpu, [[0, 1], [2, 3]], names=(\"replicate\", \"shard\"))");
  EXPECT_EQ(*mesh.coordinate(), (Dims{world_rank() / 2, world_rank() % 2}));
  EXPECT_EQ(mesh.local_rank("replicate"), world_rank() / 2);
  EXPECT_EQ(mesh.local_rank(1), world_rank() % 2);

  auto shard = mesh["shard"], replicate = mesh["replicate"];
  EXPECT_EQ(shard.ranks(), world_rank() < 2 ? (Dims{0, 1}) : (Dims{2, 3}));
  EXPECT_EQ(replicate.ranks(), world_rank() % 2 == 0 ? (Dims{0, 2}) : (Dims{1, 3}));
  EXPECT_EQ(shard.dim_names(), Names{"shard"});
  EXPECT_EQ(shard.local_rank(), world_rank() % 2);
  EXPECT_EQ((mesh[Names{"replicate", "shard"}]), mesh);

  EXPECT_EQ(mesh.communicator(1), shard.communicator()); // shared
  EXPECT_EQ(mesh.communicator(0)->ranks(), replicate.ranks());
  auto sum = torch::full({1}, world_rank(), torch::kLong);
  mesh.communicator(1)->all_reduce(sum, ReduceOp::kSum, "shard").wait();
  EXPECT_EQ(sum.item<int64_t>(), world_rank() < 2 ? 1 : 5);
  mesh.communicator(0)->all_reduce(sum, ReduceOp::kSum, "replicate").wait();
  EXPECT_EQ(sum.item<int64_t>(), 6);

  EXPECT_THROWS_WITH((mesh[Names{"shard", "replicate"}]),
                     "the dims (\"shard\", \"replicate\") of a sub-mesh must be in the order of " + mesh.to_string());
  EXPECT_THROWS_WITH((mesh[Names{"shard", "shard"}]), "each once");
  EXPECT_THROWS_WITH(mesh["tensor"], mesh.to_string() + " has no dim named \"tensor\"");
  EXPECT_THROWS_WITH(mesh[Names{}], "needs at least one dim name");
  EXPECT_THROWS_WITH(mesh.size(2), mesh.to_string() + " has no dim 2, it has 2 dims");
  EXPECT_THROWS_WITH(mesh.size(-3), mesh.to_string() + " has no dim -3, it has 2 dims");
  for (const int64_t dim : {-2, -1}) { // from the last, as in PyTorch
    EXPECT_EQ(mesh.size(dim), mesh.size(dim + 2));
    EXPECT_EQ(mesh.local_rank(dim), mesh.local_rank(dim + 2));
    EXPECT_EQ(mesh.communicator(dim), mesh.communicator(dim + 2));
  }
}

TEST(DeviceMesh, ThreeDims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  auto mesh = init_device_mesh(at::kCPU, {2, 1, 2}, {"a", "b", "c"});
  EXPECT_EQ(mesh.to_string(), "DeviceMesh(cpu, [[[0, 1]], [[2, 3]]], names=(\"a\", \"b\", \"c\"))");
  EXPECT_EQ((mesh[Names{"a", "c"}].shape()), (Dims{2, 2}));
  EXPECT_EQ((mesh[Names{"a", "c"}].ranks()), (Dims{0, 1, 2, 3}));
  EXPECT_EQ((mesh[Names{"b", "c"}].shape()), (Dims{1, 2}));
  EXPECT_EQ((mesh[Names{"b", "c"}].ranks()), world_rank() < 2 ? (Dims{0, 1}) : (Dims{2, 3}));
  EXPECT_EQ(mesh["b"].ranks(), Dims{world_rank()});
  EXPECT_EQ(mesh.communicator(1)->size(), 1);
}

TEST(DeviceMesh, FlattenJoinsTheNames) {
  const auto n = world_size();
  auto mesh = init_device_mesh(at::kCPU, {1, n}, {"a", "b"});
  EXPECT_EQ(mesh.flatten().dim_names(), Names{"a_b"});
  EXPECT_EQ(mesh.flatten("all").dim_names(), Names{"all"});
  EXPECT_EQ(mesh.flatten().shape(), Dims{n});
  EXPECT_EQ(mesh.flatten().local_rank(), world_rank());
  EXPECT_EQ(mesh.flatten().communicator(), init_device_mesh(at::kCPU, {n}).communicator()); // the world's
  EXPECT_TRUE(init_device_mesh(at::kCPU, {1, n}).flatten().dim_names().empty());
}

TEST(DeviceMesh, ExplicitRanksAndRanksOutside) {
  const auto n = world_size();
  if (n < 2) GTEST_SKIP() << "needs 2 ranks";
  auto mesh = make_device_mesh(at::kCPU, {n - 1}, [&] {
    Dims ranks;
    for (auto r = n - 1; r > 0; --r) ranks.push_back(r);
    return ranks;
  }());
  if (world_rank() == 0) {
    EXPECT_FALSE(mesh.coordinate());
    EXPECT_THROWS_WITH(mesh.local_rank(), "rank 0 is not in " + mesh.to_string());
    EXPECT_THROWS_WITH(mesh.communicator(), "rank 0 is not in " + mesh.to_string());
    EXPECT_FALSE(mesh.flatten().coordinate());
  } else {
    EXPECT_EQ(mesh.local_rank(), n - 1 - world_rank());
    auto sum = torch::ones({1});
    mesh.communicator()->all_reduce(sum, ReduceOp::kSum, "inside").wait();
    EXPECT_EQ(sum.item<float>(), n - 1);
  }
}

TEST(DeviceMesh, EqualityAndHash) {
  const auto n = world_size();
  auto a = init_device_mesh(at::kCPU, {n}, {"x"}), b = init_device_mesh(at::kCPU, {n}, {"x"});
  auto renamed = init_device_mesh(at::kCPU, {n}, {"y"}), reshaped = init_device_mesh(at::kCPU, {1, n}, {"w", "x"});
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.hash(), b.hash());
  EXPECT_FALSE(a == renamed);
  EXPECT_FALSE(a == reshaped);
  EXPECT_FALSE(a == DeviceMesh());
  EXPECT_EQ(DeviceMesh(), DeviceMesh());
  EXPECT_NE(a.hash(), renamed.hash());
  EXPECT_EQ(DeviceMesh().to_string(), "DeviceMesh(undefined)");
  EXPECT_THROWS_WITH(DeviceMesh().shape(), "the device mesh is undefined: it was default-constructed");
}

TEST(DeviceMesh, CudaWithoutADeviceIsAnError) {
  if (cuda_is_available()) GTEST_SKIP() << "needs a machine without CUDA";
  EXPECT_THROWS_WITH(init_device_mesh(at::kCUDA, {world_size()}), c10::str("device mesh on cuda: rank ", world_rank(), ": "));
}

TEST(DeviceMesh, ADeviceTypeWithoutABackendIsAnError) {
  EXPECT_THROWS_WITH(init_device_mesh(at::kMPS, {world_size()}), "there are no collectives for tensors on mps, use cpu or cuda");
}

TEST(DeviceMesh, BadMeshes) {
  const auto n = world_size();
  const auto make = [](Dims shape, Names names = {}) { return init_device_mesh(at::kCPU, std::move(shape), std::move(names)); };
  EXPECT_THROWS_WITH(make({n + 1}),
                     c10::str("device mesh of shape [", n + 1, "] holds ", n + 1, " ranks, but the world has ", n));
  if (n > 1) EXPECT_THROWS_WITH(make({1}), c10::str("but the world has ", n, "; make_device_mesh takes some of them"));
  const int64_t half = int64_t{1} << 32; // half * half wraps to 0
  EXPECT_THROWS_WITH(make({half, half, n}), c10::str(" ranks, but the world has ", n));
  EXPECT_THROWS_WITH(make({}), "device mesh: the shape is empty, it needs at least one dim");
  EXPECT_THROWS_WITH(make({n, 0}), c10::str("device mesh of shape [", n, ", 0]: dim 1 has size 0, it must be at least 1"));
  EXPECT_THROWS_WITH(make({-1}), "dim 0 has size -1, it must be at least 1");
  EXPECT_THROWS_WITH(make({n, 1}, {"a", "a"}), "device mesh: the dim name \"a\" appears twice");
  EXPECT_THROWS_WITH(make({n, 1}, {"a", ""}), "device mesh: a dim name in (\"a\", \"\") is empty");
  EXPECT_THROWS_WITH(make({n}, {"a", "b"}), c10::str("device mesh of shape [", n, "]: 2 dim names (\"a\", \"b\") for 1 dims"));
  EXPECT_THROWS_WITH(make_device_mesh(at::kCPU, {2}, {0, 0}), "device mesh: rank 0 appears twice in [0, 0]");
  EXPECT_THROWS_WITH(make_device_mesh(at::kCPU, {1}, {n}),
                     c10::str("device mesh: rank ", n, " is not in the world of ", n, " ranks"));
  EXPECT_THROWS_WITH(make_device_mesh(at::kCPU, {2}, {0}), "device mesh of shape [2] holds 2 ranks, but 1 are given: [0]");
  EXPECT_THROWS_WITH(init_device_mesh(at::kMeta, {n}), "there are no collectives for tensors on meta, use cpu or cuda");
}

} // namespace
} // namespace tessera::device_mesh_test
