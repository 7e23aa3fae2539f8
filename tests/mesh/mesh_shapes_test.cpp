#include "../support/matchers.h"
#include "../support/world.h"

#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

namespace tessera::testing::mesh_shapes_test {
namespace {

using Names = std::vector<std::string>;
using Dims = std::vector<int64_t>;

DeviceMesh over_world(Dims shape, Names names) { return init_device_mesh(at::kCPU, std::move(shape), std::move(names)); }

/// The sum of the ranks along a dim.
int64_t sum_along(const DeviceMesh& mesh, int64_t dim) {
  auto sum = torch::full({1}, world_rank(), torch::kLong);
  mesh.communicator(dim)->all_reduce(sum, ReduceOp::kSum, "ranks").wait();
  return sum.item<int64_t>();
}

TEST(MeshShapes, ASliceKnowsItsRootAndItsPlaceInIt) {
  const auto n = world_size();
  const auto mesh = over_world({1, n, 1}, {"a", "b", "c"});
  EXPECT_EQ(mesh.root(), mesh);
  for (const auto* name : {"a", "b", "c"}) {
    const auto slice = mesh[name];
    EXPECT_EQ(slice.root(), mesh);
    EXPECT_EQ(slice.root_dim(), mesh.dim_of(name));
  }
  const auto pair = mesh[Names{"b", "c"}];
  EXPECT_EQ(pair["b"].root(), mesh); // of a slice of a slice too
  EXPECT_EQ(pair.root_dim(-1), 2);
  EXPECT_EQ(pair, (mesh.slice({1, 2})));
  EXPECT_EQ(pair, (mesh[{"b", "c"}]));
  EXPECT_EQ((mesh[{"c"}]), mesh["c"]);
  EXPECT_THROWS_WITH((mesh[{"c", "b"}]), "of a sub-mesh must be in the order of " + mesh.to_string());
  EXPECT_EQ((mesh.slice({-1})), mesh["c"]);
  EXPECT_EQ((mesh.slice({0, 1, 2})), mesh);
  EXPECT_THROWS_WITH((mesh.slice({1, 0})), "the dims [1, 0] of a sub-mesh must be in the order of " + mesh.to_string());
  EXPECT_THROWS_WITH(mesh.slice({}), "needs at least one dim");
  EXPECT_THROWS_WITH(mesh.slice({3}), "has no dim 3");
}

TEST(MeshShapes, SlicesOfDifferentRootsAreNotEqual) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto slice = over_world({2, 2}, {"dp", "tp"})["tp"];
  EXPECT_EQ(slice, (over_world({2, 2}, {"dp", "tp"})["tp"]));
  EXPECT_FALSE((slice == make_device_mesh(at::kCPU, {2}, slice.ranks(), {"tp"})));
}

TEST(MeshShapes, FlattensDimsThatAreNoNeighbours) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = over_world({2, 1, 2}, {"dp", "cp", "tp"});
  const auto flat = mesh[Names{"dp", "tp"}].flatten();
  EXPECT_EQ(flat.dim_names(), Names{"dp_tp"});
  EXPECT_EQ(flat.root(), mesh);
  EXPECT_EQ(flat.root_dim(), std::nullopt);
  EXPECT_EQ(mesh["tp"].flatten("tp"), mesh["tp"]);
  EXPECT_THROWS_WITH((mesh[Names{"dp", "cp"}].flatten("tp")), "has a dim named \"tp\" already");
}

TEST(MeshShapes, UnflattenSplitsADim) {
  const auto n = world_size();
  const auto world = over_world({n}, {"world"});
  const auto mesh = world.unflatten("world", {1, n}, {"dp", "tp"});
  EXPECT_EQ(mesh.shape(), (Dims{1, n}));
  EXPECT_EQ(mesh.dim_names(), (Names{"dp", "tp"}));
  EXPECT_EQ(mesh.ranks(), world.ranks());
  EXPECT_EQ(mesh.root(), world);
  EXPECT_EQ(mesh["tp"].root_dim(), 0);
  if (n > 1) EXPECT_EQ(mesh["dp"].root_dim(), std::nullopt);
  EXPECT_EQ(mesh.flatten("world2").ranks(), world.ranks());
  EXPECT_EQ((init_device_mesh(at::kCPU, {n}).unflatten(0, {n, 1}).dim_names()), Names{});
  EXPECT_EQ(sum_along(mesh, 1), n * (n - 1) / 2);

  const auto prefix = "unflatten of dim 0 (\"world\") of " + world.to_string();
  EXPECT_THROWS_WITH((world.unflatten(0, {n, 2}, {"a", "b"})),
                     c10::str(prefix, " into [", n, ", 2]: these sizes hold more ranks than the dim's ", n));
  EXPECT_THROWS_WITH((world.unflatten(0, {}, {})), c10::str(prefix, " into []: "));
  if (n > 1)
    EXPECT_THROWS_WITH((world.unflatten(0, {1, 1}, {"a", "b"})), c10::str("these sizes hold 1 ranks, but the dim has ", n));
  EXPECT_THROWS_WITH((world.unflatten(0, {n, 0}, {"a", "b"})), "a size is 0, it must be at least 1");
  EXPECT_THROWS_WITH((world.unflatten(0, {n, 1})), "0 names for 2 dims of a mesh with names");
  EXPECT_THROWS_WITH((world.unflatten(0, {n, 1}, {"a", "a"})), "the dim name \"a\" appears twice");
  EXPECT_THROWS_WITH((world.unflatten("tp", {n, 1}, {"a", "b"})), "has no dim named \"tp\"");
}

TEST(MeshShapes, UnflattenAndSliceOfFourRanks) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto rank = world_rank();
  const auto mesh = over_world({4}, {"world"}).unflatten(0, {2, 2}, {"dp", "tp"});
  EXPECT_EQ(mesh["tp"].ranks(), rank < 2 ? (Dims{0, 1}) : (Dims{2, 3}));
  EXPECT_EQ(mesh["dp"].ranks(), rank % 2 == 0 ? (Dims{0, 2}) : (Dims{1, 3}));
  EXPECT_EQ(sum_along(mesh, 0), rank % 2 == 0 ? 2 : 4);
  EXPECT_EQ(mesh["dp"].communicator(), over_world({2, 2}, {"a", "b"})["a"].communicator()); // shared by ranks

  // From tp inside to tp outside, flattened: ranks 0, 2, 1, 3. A half of it is a dim again.
  const auto turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(turned.ranks(), (Dims{0, 2, 1, 3}));
  const auto flat = turned.flatten();
  EXPECT_EQ(flat.dim_names(), Names{"tp_dp"});
  EXPECT_EQ(flat.local_rank(), rank % 2 * 2 + rank / 2);
  EXPECT_EQ((flat.unflatten(0, {2, 2}, {"tp", "dp"})), turned);
}

TEST(MeshShapes, ConcatenatesSlicesOfOneRoot) {
  const auto n = world_size();
  const auto mesh = over_world({1, n}, {"dp", "tp"});
  EXPECT_EQ((DeviceMesh::concatenate({mesh["dp"], mesh["tp"]})), mesh);
  const auto turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(turned.shape(), (Dims{n, 1}));
  EXPECT_EQ(turned.dim_names(), (Names{"tp", "dp"}));
  EXPECT_EQ(*turned.coordinate(), (Dims{world_rank(), 0}));
  EXPECT_EQ(turned.root_dim(0), 1);
  EXPECT_EQ((DeviceMesh::concatenate({mesh["tp"]})), mesh["tp"]);

  EXPECT_THROWS_WITH((DeviceMesh::concatenate({})), "concatenate: the list of meshes is empty");
  if (n == 1) return;
  EXPECT_THROWS_WITH((DeviceMesh::concatenate({mesh["tp"], mesh})),
                     "concatenate: " + mesh.to_string() + " overlaps a mesh before it, such as " + mesh["tp"].to_string());
  const auto alone = make_device_mesh(at::kCPU, {1}, {world_rank()}, {"x"});
  EXPECT_THROWS_WITH((DeviceMesh::concatenate({mesh["tp"], alone})),
                     "concatenate: " + mesh["tp"].to_string() + " and " + alone.to_string() +
                         " are slices of different meshes: " + mesh.to_string() + " and " + alone.to_string());
}

TEST(MeshShapes, ConcatenateOfTwoDimsWithOneName) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto one = over_world({2, 2}, {"x", "y"}), other = over_world({2, 2}, {"y", "x"});
  EXPECT_THROWS_WITH((DeviceMesh::concatenate({one["x"], other["x"]})), "the dim name \"x\" appears twice");
}

TEST(MeshShapes, ARankOutsideCannotSlice) {
  if (world_size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = make_device_mesh(at::kCPU, {1, 1}, {0}, {"a", "b"});
  EXPECT_EQ(mesh.flatten().ranks(), Dims{0});
  EXPECT_EQ((mesh.unflatten("a", {1, 1}, {"c", "d"}).shape()), (Dims{1, 1, 1}));
  if (world_rank() == 0) return;
  EXPECT_THROWS_WITH(mesh["a"], c10::str("rank ", world_rank(), " is not in ", mesh.to_string()));
  EXPECT_THROWS_WITH((DeviceMesh::concatenate({mesh})), c10::str("rank ", world_rank(), " is not in ", mesh.to_string()));
}

} // namespace
} // namespace tessera::testing::mesh_shapes_test
