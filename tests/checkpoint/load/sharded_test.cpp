// Sharded tensors, saved under every layout and loaded under every other one, on meshes of every size that the job has ranks for.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/dtensor/api.h>
#include <torch/torch.h>

#include <cmath>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::checkpoint::sharded_test {
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
    const auto add = [&](const std::string& name, const std::function<Placement(const Sizes&)>& placement) {
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
  return make_device_mesh(testing::test_device_type(), layout.mesh, ranks);
}

// The tensors of kShapes and a 0-dim one, plain.
StateDict plain_state() {
  StateDict state;
  for (size_t i = 0; i < kShapes.size(); ++i) state.add(c10::str("t", i), values(kShapes[i], i));
  state.add("scalar", values({}, 100));
  return state;
}

// The same, laid out by distribute_tensor.
StateDict sharded_state(const Layout& layout, const DeviceMesh& mesh) {
  StateDict state;
  const auto plain = plain_state();
  for (const auto& entry : plain.entries()) {
    const auto& full = plain.tensor(entry.name);
    const auto placements = full.dim() == 0 ? Placements(layout.mesh.size(), Replicate{}) : layout.placements(full.sizes().vec());
    state.add(entry.name, distribute_tensor(full.to(mesh.device()), mesh, placements));
  }
  return state;
}

// Zeros of the same layouts.
StateDict zeros_like(const StateDict& state) {
  StateDict zeros;
  for (const auto& entry : state.entries()) {
    const auto& tensor = state.tensor(entry.name);
    if (is_dtensor(tensor)) {
      const DTensor sharded(tensor);
      zeros.add(entry.name,
                from_local(torch::zeros_like(sharded.local()), sharded.mesh(), sharded.placements(), tensor.sizes().vec()));
    } else {
      zeros.add(entry.name, torch::zeros_like(tensor));
    }
  }
  return zeros;
}

void expect_same_shards(const StateDict& actual, const StateDict& expected) {
  const auto local = [](const at::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).local() : tensor; };
  for (const auto& entry : expected.entries()) {
    SCOPED_TRACE(entry.name);
    EXPECT_TENSORS_EQUAL(local(actual.tensor(entry.name)), local(expected.tensor(entry.name)));
  }
}

TEST(ShardedCheckpoint, EveryLayoutLoadsIntoEveryOther) {
  const SharedFolder folder;
  std::vector<std::string> names{"plain"};
  std::vector<StateDict> states{plain_state()};
  for (const auto& layout : layouts()) {
    names.push_back(layout.name);
    states.push_back(sharded_state(layout, mesh_of(layout)));
  }
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t from = 0; from < states.size(); ++from) {
    save(states[from], folder.path() / std::to_string(from));
    for (size_t to = 0; to < states.size(); ++to) pairs.emplace_back(from, to);
  }
  for (const auto& [from, to] : testing::sweep(pairs, 60)) {
    SCOPED_TRACE(names[from] + " to " + names[to]);
    auto state = zeros_like(states[to]);
    load(state, folder.path() / std::to_string(from));
    expect_same_shards(state, states[to]);
  }
}

TEST(ShardedCheckpoint, EveryElementIsWrittenOnce) {
  const SharedFolder folder;
  for (const auto& layout : layouts()) {
    const auto path = folder.path() / layout.name;
    save(sharded_state(layout, mesh_of(layout)), path);
    int64_t bytes = 0, expected = 4;
    for (const auto& file : internal::read_index(path).files) bytes += file.bytes - file.data_begin;
    for (const auto& shape : kShapes) expected += 4 * c10::multiply_integers(shape);
    EXPECT_EQ(bytes, expected) << layout.name;
  }
}

TEST(ShardedCheckpoint, ReplicatedTensorsAreBalancedOverRanks) {
  const auto n = process_context().world_size();
  const SharedFolder folder;
  const auto mesh = mesh_of({"", {n}, {}});
  StateDict state;
  for (int i = 0; i < 4 * n; ++i)
    state.add(std::to_string(i), distribute_tensor(torch::full({1000}, i, mesh.device()), mesh, {Replicate{}}));
  save(state, folder.path() / "c");
  const auto index = internal::read_index(folder.path() / "c");
  ASSERT_EQ(index.files.size(), n);
  for (const auto& file : index.files) EXPECT_EQ(file.bytes - file.data_begin, 4 * 8000) << file.name;
}

TEST(ShardedCheckpoint, PartialIsAnErrorThatNamesTheTensor) {
  const SharedFolder folder;
  const auto mesh = mesh_of({"", {process_context().world_size()}, {}});
  StateDict state;
  state.add("sum", from_local(torch::ones({3}, mesh.device()), mesh, {Partial{}}));
  EXPECT_THROWS_WITH(save(state, folder.path() / "c"), "tensor \"sum\": a tensor with placement Partial has no value of its own");
}

// Threads that read files copy to the device where the program has launched what the tensors are used for.
TEST(ShardedCheckpoint, FollowTheStreamOfTheProgram) {
  namespace sim = testing::sim;
  if (testing::test_device_type() != sim::kDeviceType) GTEST_SKIP() << "the simulated device finds what streams do not order";
  const SharedFolder folder;
  const auto mesh = mesh_of({"", {process_context().world_size()}, {}});
  const c10::StreamGuard guard(sim::new_stream("training"));
  StateDict state;
  state.add("sharded", distribute_tensor(torch::ones({8, 4000}), mesh, {Shard{0}}));
  state.add("plain", torch::ones({4000}, mesh.device()));
  for (int round = 0; round < 2; ++round) {
    const auto path = folder.path() / std::to_string(round);
    const auto each = [&](const auto& use) {
      for (const auto* name : {"sharded", "plain"}) use(state.tensor(name));
    };
    each([](torch::Tensor tensor) { tensor.mul_(3); });
    save(state, path);
    each([](torch::Tensor tensor) { tensor.zero_(); });
    load(state, path);
    each([&](const torch::Tensor& tensor) {
      const auto whole = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
      EXPECT_TRUE(whole.eq(std::pow(3, round + 1)).all().item<bool>());
    });
  }
}

} // namespace
} // namespace tessera::checkpoint::sharded_test
