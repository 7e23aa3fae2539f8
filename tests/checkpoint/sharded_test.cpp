// Sharded tensors, saved under every layout and loaded under every other one, on meshes of every size that the job has ranks for.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/index.h>
#include <tessera/dtensor/api.h>

#include "../support/matchers.h"
#include "../support/sweep.h"
#include "shared_folder.h"

namespace tessera::checkpoint {
namespace {

using testing::SharedFolder;
using Sizes = std::vector<int64_t>;

const std::vector<Sizes> kShapes{{7, 5}, {1, 3}, {4, 4}, {2, 3, 4}, {0, 2}, {300, 1025}};

// Extents of about n / ranks each, moved so that some are 0 and one is large.
RaggedShard ragged(const Sizes& sizes, int64_t dim, int64_t ranks) {
  int64_t n = 1;
  for (int64_t d = 0; d <= dim; ++d) n *= sizes[d];
  std::vector<int64_t> extents(static_cast<size_t>(ranks), 0);
  extents[ranks / 2] = n - n / 3;
  extents[ranks - 1] += n / 3;
  return {dim, extents};
}

struct Layout {
  std::string name;
  Sizes mesh;
  std::function<Placements(const Sizes&)> placements;
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (int64_t n = 1; n <= process_context().world_size(); ++n) {
    const auto add = [&](const std::string& name, std::function<Placement(const Sizes&)> placement) {
      all.push_back({c10::str(name, " on ", n), {n}, [placement](const Sizes& sizes) { return Placements{placement(sizes)}; }});
    };
    add("Replicate", [](const Sizes&) { return Replicate{}; });
    add("Shard(0)", [](const Sizes&) { return Shard{0}; });
    add("Shard(1)", [](const Sizes&) { return Shard{1}; });
    add("RaggedShard(0)", [n](const Sizes& sizes) { return ragged(sizes, 0, n); });
    add("RaggedShard(1)", [n](const Sizes& sizes) { return ragged(sizes, 1, n); });
  }
  if (process_context().world_size() < 4) return all;
  const auto add = [&](const std::string& name, std::function<Placements(const Sizes&)> placements) {
    all.push_back({name + " on 2x2", {2, 2}, std::move(placements)});
  };
  add("Replicate, Shard(0)", [](const Sizes&) { return Placements{Replicate{}, Shard{0}}; });
  add("Replicate, RaggedShard(0)", [](const Sizes& sizes) { return Placements{Replicate{}, ragged(sizes, 0, 2)}; });
  add("Replicate, RaggedShard(1)", [](const Sizes& sizes) { return Placements{Replicate{}, ragged(sizes, 1, 2)}; });
  add("Shard(0), Shard(1)", [](const Sizes&) { return Placements{Shard{0}, Shard{1}}; });
  add("Shard(0), Shard(0)", [](const Sizes&) { return Placements{Shard{0}, Shard{0}}; });
  return all;
}

at::Tensor values(const Sizes& sizes, size_t seed) {
  at::manual_seed(seed);
  return torch::randn(sizes);
}

DeviceMesh mesh_of(const Layout& layout) {
  int64_t size = 1;
  for (const auto n : layout.mesh) size *= n;
  Sizes ranks(static_cast<size_t>(size));
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int64_t>(r);
  return make_device_mesh(at::kCPU, layout.mesh, ranks);
}

StateDict state_of(const Layout& layout, const DeviceMesh& mesh, bool filled) {
  StateDict state;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const auto full = filled ? values(kShapes[i], i) : torch::zeros(kShapes[i]);
    state.add(c10::str("t", i), distribute_tensor(full, mesh, layout.placements(kShapes[i])));
  }
  const auto scalar = filled ? values({}, 100) : torch::zeros({});
  state.add("scalar", distribute_tensor(scalar, mesh, Placements(layout.mesh.size(), Replicate{})));
  return state;
}

void expect_filled(const StateDict& state, const DeviceMesh& mesh) {
  if (!mesh.coordinate()) return;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    EXPECT_TENSORS_EQUAL(DTensor(state.tensor(c10::str("t", i))).full_tensor(), values(kShapes[i], i));
  }
  EXPECT_TENSORS_EQUAL(DTensor(state.tensor("scalar")).full_tensor(), values({}, 100));
}

TEST(ShardedCheckpoint, EveryLayoutLoadsIntoEveryOther) {
  const SharedFolder folder;
  const auto all = layouts();
  std::vector<DeviceMesh> meshes;
  for (const auto& layout : all) meshes.push_back(mesh_of(layout));
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t from = 0; from < all.size(); ++from) {
    save(state_of(all[from], meshes[from], true), folder.path() / std::to_string(from));
    for (size_t to = 0; to < all.size(); ++to) pairs.emplace_back(from, to);
  }
  for (const auto& [from, to] : testing::sweep(pairs, 150)) {
    SCOPED_TRACE(all[from].name + " to " + all[to].name);
    auto state = state_of(all[to], meshes[to], false);
    load(state, folder.path() / std::to_string(from));
    expect_filled(state, meshes[to]);
  }
}

TEST(ShardedCheckpoint, LoadsIntoPlainTensorsAndFromThem) {
  const SharedFolder folder;
  StateDict plain;
  for (size_t i = 0; i < kShapes.size(); ++i) plain.add(c10::str("t", i), values(kShapes[i], i));
  plain.add("scalar", values({}, 100));
  save(plain, folder.path() / "plain");
  const auto all = layouts();
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].name);
    const auto mesh = mesh_of(all[i]);
    auto sharded = state_of(all[i], mesh, false);
    load(sharded, folder.path() / "plain");
    expect_filled(sharded, mesh);

    save(sharded, folder.path() / std::to_string(i));
    for (const auto& entry : plain.entries()) plain.tensor(entry.name).zero_();
    load(plain, folder.path() / std::to_string(i));
    for (size_t t = 0; t < kShapes.size(); ++t) EXPECT_TENSORS_EQUAL(plain.tensor(c10::str("t", t)), values(kShapes[t], t));
  }
}

TEST(ShardedCheckpoint, EveryElementIsWrittenOnce) {
  const SharedFolder folder;
  for (const auto& layout : layouts()) {
    const auto path = folder.path() / layout.name;
    save(state_of(layout, mesh_of(layout), true), path);
    int64_t bytes = 0, expected = 4;
    for (const auto& file : read_index(path).files) bytes += file.bytes - file.data_begin;
    for (const auto& shape : kShapes) expected += 4 * c10::multiply_integers(shape);
    EXPECT_EQ(bytes, expected) << layout.name;
  }
}

TEST(ShardedCheckpoint, ReplicatedTensorsAreBalancedOverRanks) {
  const auto n = process_context().world_size();
  const SharedFolder folder;
  const auto mesh = mesh_of({"", {n}, {}});
  StateDict state;
  for (int i = 0; i < 4 * n; ++i) state.add(std::to_string(i), distribute_tensor(torch::full({1000}, i), mesh, {Replicate{}}));
  save(state, folder.path() / "c");
  const auto index = read_index(folder.path() / "c");
  ASSERT_EQ(index.files.size(), n);
  for (const auto& file : index.files) EXPECT_EQ(file.bytes - file.data_begin, 4 * 8000) << file.name;
}

TEST(ShardedCheckpoint, PartialIsAnErrorThatNamesTheTensor) {
  const SharedFolder folder;
  const auto mesh = mesh_of({"", {process_context().world_size()}, {}});
  StateDict state;
  state.add("sum", from_local(torch::ones({3}), mesh, {Partial{}}));
  EXPECT_THROWS_WITH(save(state, folder.path() / "c"), "tensor \"sum\": a tensor with placement Partial has no value of its own");
}

} // namespace
} // namespace tessera::checkpoint
