#include "../support/matchers.h"
#include "../support/world.h"

#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

namespace tessera::testing::communicator_mesh_test {
namespace {

using Dims = std::vector<int64_t>;

CommunicatorPtr connect(const Dims& ranks, const char* purpose = "own") {
  return process_context().communicator(ranks, at::kCPU, purpose);
}

Dims all_ranks_reversed() {
  Dims ranks;
  for (auto rank = world_size(); rank-- > 0;) ranks.push_back(rank);
  return ranks;
}

TEST(CommunicatorMesh, OneCommunicatorGivesTheRanks) {
  const auto own = connect(all_ranks_reversed());
  const auto mesh = mesh_from_communicator(own, "dp");
  EXPECT_EQ(mesh.ranks(), all_ranks_reversed());
  EXPECT_EQ(mesh.dim_names(), std::vector<std::string>{"dp"});
  EXPECT_EQ(mesh.local_rank(), last_rank() - world_rank());
  EXPECT_EQ(mesh.communicator(), own);
  EXPECT_EQ(mesh.communicator(0, "another purpose"), own);
  EXPECT_EQ(mesh["dp"].communicator(), own);
  EXPECT_EQ(mesh.flatten("flat").communicator(), own);
  EXPECT_TRUE(mesh_from_communicator(own).dim_names().empty());
  EXPECT_EQ(mesh_from_communicator(own), mesh_from_communicator(own));
  EXPECT_FALSE(mesh_from_communicator(own) == mesh_from_communicator(connect(all_ranks_reversed(), "other")));
  EXPECT_FALSE((mesh_from_communicator(own) == make_device_mesh(at::kCPU, {world_size()}, all_ranks_reversed())));
}

TEST(CommunicatorMesh, ADTensorIsSentOverIt) {
  Dims ranks(static_cast<size_t>(world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto own = connect(ranks);
  const auto before = own->counters().get(CollectiveKind::kAllGather).calls;
  const auto whole = torch::arange(5, torch::kFloat);
  const auto sharded = distribute_tensor(whole, mesh_from_communicator(own), {Shard{0}});
  EXPECT_TRUE(torch::equal(sharded.full_tensor(), whole));
  if (world_size() > 1) EXPECT_GT(own->counters().get(CollectiveKind::kAllGather).calls, before);
}

TEST(CommunicatorMesh, ADimEach) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto rank = world_rank();
  const auto outer = connect({rank % 2, rank % 2 + 2}), inner = connect({rank / 2 * 2, rank / 2 * 2 + 1});
  const auto mesh = mesh_from_communicators({outer, inner}, {2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.communicator(0), outer);
  EXPECT_EQ(mesh["tp"].communicator(), inner);
  EXPECT_EQ((DeviceMesh::concatenate({mesh["tp"], mesh["dp"]}).communicator(1)), outer);
  EXPECT_EQ(mesh.flatten().communicator()->size(), 4); // of no dim of the program's

  const Dims swapped{rank / 2 * 2 + 1, rank / 2 * 2};
  EXPECT_THROWS_WITH(
      (mesh_from_communicators({outer, connect(swapped)}, {2, 2}, {0, 1, 2, 3})),
      c10::str("for dim 1 of DeviceMesh(cpu, [[0, 1], [2, 3]]) has rank ", swapped[1], " at place 1, but the mesh at place 0"));
  EXPECT_THROWS_WITH((mesh_from_communicators({inner, outer}, {2, 2}, {0, 1, 2, 3})),
                     rank != 1 ? " lacks rank " : "for dim 0 of DeviceMesh(cpu, [[0, 1], [2, 3]]) has rank ");
}

TEST(CommunicatorMesh, BadCommunicators) {
  const auto n = world_size();
  Dims ranks(static_cast<size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto own = connect(ranks);
  EXPECT_THROWS_WITH(mesh_from_communicator(nullptr), "mesh_from_communicator: the communicator is null");
  EXPECT_THROWS_WITH((mesh_from_communicators({own, nullptr}, {n, 1}, ranks)),
                     "mesh_from_communicators: the communicator of dim 1 is null");
  EXPECT_THROWS_WITH((mesh_from_communicators({own}, {n, 1}, ranks)),
                     c10::str("mesh_from_communicators: 1 communicators for a mesh of shape [", n, ", 1], which has 2 dims"));
  EXPECT_THROWS_WITH((mesh_from_communicators({}, {}, ranks)), "0 communicators for a mesh of shape []");
  if (n == 1) return;
  EXPECT_THROWS_WITH((mesh_from_communicators({own}, {n}, all_ranks_reversed())),
                     c10::str("the communicator \"own\" of the ranks [", c10::Join(", ", ranks), "] for dim 0 of ",
                              make_device_mesh(at::kCPU, {n}, all_ranks_reversed()).to_string(), " has rank ", n - 1,
                              " at place ", n - 1, ", but the mesh at place 0"));
  const auto alone = connect({world_rank()});
  const auto outsider = n - 1 - world_rank() == world_rank() ? 0 : n - 1 - world_rank();
  EXPECT_THROWS_WITH((mesh_from_communicators({own}, {1}, {world_rank()})), c10::str(" has rank "));
  EXPECT_THROWS_WITH((mesh_from_communicators({alone}, {1}, {outsider})),
                     c10::str("mesh_from_communicators: rank ", world_rank(), " is not in "));
}

} // namespace
} // namespace tessera::testing::communicator_mesh_test
