// Saves and loads by some of the ranks, while the others go on.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::subset_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::line_mesh;
using testing::SharedFolder;
using testing::Training;
using testing::world_rank;
using testing::world_size;

DeviceMesh mesh_of(const std::vector<int64_t>& ranks) {
  const auto size = static_cast<int64_t>(ranks.size());
  return make_device_mesh(testing::test_device_type(), {size}, ranks);
}

bool is_in(const DeviceMesh& mesh) { return mesh.coordinate().has_value(); }

StateDict numbers(const DeviceMesh& mesh, double value) {
  StateDict state;
  state.add("w", distribute_tensor(torch::full({8, 3}, value), mesh, {Shard{0}}));
  state.add("plain", torch::full({2}, value));
  state.set("step", static_cast<int64_t>(value));
  return state;
}

void expect_numbers(const StateDict& state, double value) {
  EXPECT_TENSORS_EQUAL(testing::whole_tensor(state.tensor("w")), torch::full({8, 3}, value));
  EXPECT_TENSORS_EQUAL(testing::whole_tensor(state.tensor("plain")), torch::full({2}, value));
  EXPECT_EQ(state.value<int64_t>("step"), static_cast<int64_t>(value));
}

// Two halves of the ranks, and the folder of each.
TEST(SubsetOfRanks, DisjointOnesSaveAndLoadAtTheSameTime) {
  if (world_size() == 1) GTEST_SKIP() << "no subsets";
  const SharedFolder folder;
  std::vector<int64_t> low, high;
  for (int64_t r = 0; r < world_size(); ++r) (2 * r < world_size() ? low : high).push_back(r);
  const auto first = mesh_of(low), second = mesh_of(high);
  const auto& own = is_in(first) ? first : second;
  const double value = is_in(first) ? 1 : 2;
  const auto root = folder.path() / (is_in(first) ? "first" : "second");
  for (int step = 1; step <= 3; ++step) save(numbers(own, value), root / c10::str("step-", step), {.keep_last = 2, .mesh = own});
  auto state = numbers(own, 0);
  load(state, latest(root), {.mesh = own});
  expect_numbers(state, value);
  expect_numbers(read_state_dict(latest(root), {.mesh = own}), value);
  {
    Checkpointer checkpointer(own);
    checkpointer.save(numbers(own, value + 2), root / "step-4");
    checkpointer.save(numbers(own, value + 4), root / "step-5", {.mesh = own});
    checkpointer.wait();
    EXPECT_THAT(error_of([&] { checkpointer.save(numbers(own, 1), root / "step-6", {.mesh = line_mesh()}); }),
                HasSubstr("SaveOptions::mesh is another than the Checkpointer's"));
  }
  // What some ranks saved, all load.
  SharedFolder::barrier();
  for (const auto* name : {"first", "second"}) {
    auto all = numbers(line_mesh(), 0);
    load(all, folder.path() / name / "step-5");
    expect_numbers(all, name == std::string("first") ? 5 : 6);
  }
}

TEST(SubsetOfRanks, OneRankSavesWhileTheOthersCommunicate) {
  const SharedFolder folder;
  const auto one = mesh_of({world_size() - 1});
  StateDict state;
  state.add("plain", torch::full({2}, world_rank()));
  if (is_in(one)) save(state, folder.path() / "c", {.mesh = one});
  auto& context = process_context();
  std::vector<int64_t> others;
  for (int64_t r = 0; r + 1 < world_size(); ++r) others.push_back(r);
  if (!is_in(one)) context.communicator(others, at::kCPU)->barrier("others");
  SharedFolder::barrier();
  EXPECT_TENSORS_EQUAL(read_state_dict(folder.path() / "c").tensor("plain"), torch::full({2}, world_size() - 1));
}

// Each replica of HSDP holds the whole state: the first one saves.
TEST(SubsetOfRanks, AReplicaSavesForAll) {
  if (world_size() != 4) GTEST_SKIP() << "two replicas of two ranks";
  const SharedFolder folder;
  Training saved("hybrid-ragged", 1), loaded("hybrid-per-parameter", 2);
  saved.step(0);
  const auto replica = mesh_of({0, 1});
  if (is_in(replica)) save(saved.state(), folder.path() / "c", {.mesh = replica});
  SharedFolder::barrier();
  load(loaded.state(), folder.path() / "c");
  testing::expect_same(loaded.state(), saved.state());
  EXPECT_NEAR(loaded.step(1), saved.step(1), 1e-6);
  // A load that left the other replica as it was would make two models of them.
  if (is_in(replica)) {
    EXPECT_THAT(error_of([&] { load(loaded.state(), folder.path() / "c", {.mesh = replica}); }),
                HasSubstr("and rank 2 does not take part"));
  }
}

TEST(SubsetOfRanks, ErrorsNameTheRank) {
  if (world_size() == 1) GTEST_SKIP() << "no subsets";
  const SharedFolder folder;
  std::vector<int64_t> all_but_first;
  for (int64_t r = 1; r < world_size(); ++r) all_but_first.push_back(r);
  const auto some = mesh_of(all_but_first);
  if (!is_in(some)) { // rank 0 alone
    const auto not_in = HasSubstr("checkpoint: rank 0 is not in " + some.to_string());
    EXPECT_THAT(error_of([&] { save(StateDict(), folder.path() / "c", {.mesh = some}); }), not_in);
    EXPECT_THAT(error_of([&] { load(StateDict(), folder.path() / "c", {.mesh = some}); }), not_in);
    EXPECT_THAT(error_of([&] { read_state_dict(folder.path() / "c", {.mesh = some}); }), not_in);
    EXPECT_THAT(error_of([&] { const Checkpointer checkpointer(some); }), not_in);
  }
  EXPECT_THAT(error_of([&] { save(StateDict(), folder.path() / "c", {.mesh = DeviceMesh()}); }), HasSubstr("is undefined"));
  const auto state = numbers(line_mesh(), 1); // on ranks that do not take part
  if (is_in(some)) {
    const auto held = 24 - 3 * ((8 + world_size() - 1) / world_size());
    EXPECT_THAT(error_of([&] { save(state, folder.path() / "c", {.mesh = some}); }),
                HasSubstr(c10::str("tensor \"w\": the ranks hold ", held, " of its 24 elements; it lies on DeviceMesh")));
    auto alone = numbers(some, 1);
    save(alone, folder.path() / "c", {.mesh = some});
    auto target = state;
    EXPECT_THAT(error_of([&] { load(target, folder.path() / "c", {.mesh = some}); }),
                HasSubstr("tensor \"w\" lies on DeviceMesh"));
    // In an error of one rank it has its number in the job.
    EXPECT_THAT(error_of([&] { save(alone, folder.path() / "c", {.mesh = some}); }), HasSubstr("rank 1: "));
    StateDict differing;
    differing.set("step", world_rank());
    if (all_but_first.size() > 1)
      EXPECT_THAT(error_of([&] { save(differing, folder.path() / "d", {.mesh = some}); }),
                  HasSubstr("value \"step\" is {\"i64\":1} on rank 1 and {\"i64\":2} on rank 2"));
  }
}

} // namespace
} // namespace tessera::checkpoint::subset_test
