// Saves and loads by several ranks of state that is not sharded, and errors that only one rank meets.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/checkpoint/torch_file.h>
#include <tessera/dtensor/api.h>
#include <torch/torch.h>

#include <string>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/scoped_environment.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::ranks_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::last_rank;
using testing::ScopedEnvironment;
using testing::SharedFolder;
using testing::world_rank;
using testing::world_size;

TEST(Ranks, EveryRankGetsAllResults) {
  const auto results =
      internal::Ranks().all("test", [] { return std::string(static_cast<size_t>(world_rank()), 'x') + std::string(1, '\0'); });
  ASSERT_EQ(results.size(), world_size());
  for (int64_t r = 0; r < world_size(); ++r) EXPECT_EQ(results[r], std::string(r, 'x') + '\0');
}

TEST(Ranks, AnErrorOnOneIsAnErrorOnAll) {
  const auto error = error_of([] {
    internal::Ranks().all("count", [] {
      TORCH_CHECK(world_rank() != last_rank(), "no more");
      return std::string("fine");
    });
  });
  EXPECT_THAT(error, HasSubstr(c10::str("checkpoint: cannot count: rank ", last_rank(), ": no more")));
  const auto of_all = error_of([] { internal::Ranks().all("count", []() -> std::string { throw std::runtime_error("bad"); }); });
  EXPECT_EQ(of_all, "checkpoint: cannot count: " + testing::all_ranks() + ": bad");
}

TEST(Ranks, EqualErrorsAreShownOnceWithTheirRanks) {
  if (world_size() < 3) GTEST_SKIP() << "two ranks with one error, and one without";
  const auto error = error_of([] {
    internal::Ranks().all("count", [] { TORCH_CHECK(world_rank() == 1, world_rank() == 0 || world_rank() == 2 ? "a" : "b"); });
  });
  EXPECT_EQ(error, c10::str("checkpoint: cannot count: ranks 0, 2: a", world_size() == 4 ? "\nrank 3: b" : ""));
}

// What each rank gives a call, and the call that all make alike after it.
TEST(RanksCheckpoint, WhatDiffersBetweenRanksIsAnErrorAndTheNextCallWorks) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const SharedFolder folder;
  const bool odd = world_rank() == last_rank();
  const auto mine = folder.path() / (odd ? "odd" : "even");
  StateDict state;
  state.add("w", torch::ones({2}));
  save(state, folder.path() / "odd");
  save(state, folder.path() / "even");
  const std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"start to save ", [&] { save(state, mine / "c"); }},
      {"start to save ", [&] { save_hugging_face(state, mine / "c"); }},
      {"start to save ", [&] { save_torch(state, mine / "c"); }},
      {"load ", [&] { load(state, mine); }},
      {"read ", [&] { read_state_dict(mine); }}};
  for (const auto& [verb, call] : calls) {
    const auto error = error_of(call);
    EXPECT_THAT(error, ::testing::StartsWith("checkpoint: the ranks do not call the same, which they must:\nrank"));
    EXPECT_THAT(error, HasSubstr("\nSaveOptions::mesh and LoadOptions::mesh let"));
    EXPECT_THAT(error, HasSubstr(": " + verb + (folder.path() / "even").string()));
    EXPECT_THAT(error, HasSubstr(c10::str("rank ", last_rank(), ": ", verb, (folder.path() / "odd").string())));
    load(state, folder.path() / "even");
  }
  EXPECT_THAT(error_of([&] { odd ? save(state, folder.path() / "new") : static_cast<void>(load(state, mine)); }),
              HasSubstr(c10::str("rank ", last_rank(), ": start to save ", (folder.path() / "new").string())));
  save(state, folder.path() / "new");
}

// The parts of one tensor must come from one saved tensor.
TEST(RanksCheckpoint, ALoadThatDiffersBetweenRanksIsAnError) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const SharedFolder folder;
  const bool odd = world_rank() == last_rank();
  const auto mesh = init_device_mesh(testing::test_device_type(), {world_size()});
  const auto sharded = [&](double value) { return distribute_tensor(torch::full({8}, value), mesh, {Shard{0}}); };
  StateDict saved;
  saved.add("a", sharded(1));
  saved.add("b", sharded(2));
  save(saved, folder.path() / "c");
  StateDict one;
  one.add("a", sharded(0));
  const auto rename = [&](const std::string& name) { return odd ? "b" : name; };
  EXPECT_THAT(error_of([&] { load(one, folder.path() / "c", {.allow_unused = true, .rename = rename}); }),
              HasSubstr(c10::str("rank ", last_rank(), " would load other tensors, or from other names, than rank 0")));
  const auto filter = [&](const std::string& name) { return !odd || name == "b"; };
  EXPECT_THAT(error_of([&] { load(one, folder.path() / "c", {.allow_unused = true, .filter = filter}); }),
              HasSubstr(c10::str("rank ", last_rank(), " would load other tensors")));
  EXPECT_TENSORS_EQUAL(DTensor(one.tensor("a")).full_tensor(), torch::zeros({8}));
}

/// A program's own timeout gives way to the environment's.
void start_with_timeout(const char* seconds) {
  const ScopedEnvironment timeout("TESSERA_TIMEOUT_SECONDS", seconds);
  init_process_group();
}

TEST(RanksCheckpoint, ACallOfOneRankAloneSaysThatAllMustCall) {
  if (world_size() == 1) GTEST_SKIP() << "no other rank";
  for (const bool connected : {false, true}) {
    SharedFolder::barrier();
    destroy_process_group();
    start_with_timeout("1");
    const auto store = process_context().store();
    if (connected) internal::Ranks().all("connect", [] {});
    if (world_rank() == 0) {
      const testing::TemporaryFolder folder;
      StateDict state;
      state.set("step", 1);
      const auto error = error_of([&] { save(state, folder.path() / "alone"); });
      EXPECT_THAT(error, HasSubstr("must each call"));
      if (connected) EXPECT_THAT(error, HasSubstr("cannot start to save " + (folder.path() / "alone").string()));
      store->set("has failed", "");
    }
    store->wait({"has failed"}, std::chrono::seconds(20));
    destroy_process_group();
    init_process_group();
  }
}

TEST(RanksCheckpoint, PlainTensorsAreTheLowestRanks) {
  const SharedFolder folder;
  StateDict state;
  state.add("common", torch::full({3}, world_rank()));
  state.add(c10::str("of-rank-", world_rank()), torch::full({2}, world_rank()));
  state.set("step", 7);
  state.set(c10::str("rng-", world_rank()), world_rank());
  save(state, folder.path() / "c");
  const auto index = internal::read_index(folder.path() / "c");
  EXPECT_EQ(index.world_size, world_size());
  EXPECT_EQ(index.tensors.size(), 1 + world_size());
  EXPECT_EQ(index.files.size(), world_size());

  StateDict all;
  all.add("common", torch::full({3}, -1, at::kLong));
  for (int64_t r = 0; r < world_size(); ++r) {
    all.add(c10::str("of-rank-", r), torch::full({2}, -1, at::kLong));
    all.set(c10::str("rng-", r), -1);
  }
  all.set("step", 0);
  load(all, folder.path() / "c");
  EXPECT_TRUE(torch::equal(all.tensor("common"), torch::zeros({3}, at::kLong)));
  for (int64_t r = 0; r < world_size(); ++r) {
    EXPECT_TRUE(torch::equal(all.tensor(c10::str("of-rank-", r)), torch::full({2}, r)));
    EXPECT_EQ(all.value<int64_t>(c10::str("rng-", r)), r);
  }
  EXPECT_EQ(all.value<int64_t>("step"), 7);
  // Unused by this rank, but not by all of them.
  StateDict own;
  own.add(c10::str("of-rank-", world_rank()), torch::full({2}, -1, at::kLong));
  own.set(c10::str("rng-", world_rank()), -1);
  own.set("step", 0);
  if (world_rank() == 0) own.add("common", torch::full({3}, -1, at::kLong));
  load(own, folder.path() / "c");
}

TEST(RanksCheckpoint, ValuesThatDifferAreAnErrorOnEveryRank) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const SharedFolder folder;
  StateDict state;
  state.set("step", world_rank() == last_rank() ? 1 : 0);
  EXPECT_THAT(error_of([&] { save(state, folder.path() / "c"); }),
              HasSubstr(c10::str("value \"step\" is {\"i64\":0} on rank 0 and {\"i64\":1} on rank ", last_rank())));
  SharedFolder::barrier(); // rank 0 removes what was begun
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RanksCheckpoint, AnOptionThatIsWrongOnOneRankIsAnErrorOnEveryRank) {
  const SharedFolder folder;
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "c", {.keep_last = world_rank() == last_rank() ? -1 : 0}); }),
              HasSubstr(c10::str("rank ", last_rank(), ": keep_last is -1")));
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "latest"); }),
              HasSubstr("rank 0: " + (folder.path() / "latest").string() + ": the name \"latest\" is kept for the link"));
  SharedFolder::barrier(); // rank 0 removes what was begun
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RanksCheckpoint, AFailureOfOneRankIsNamedOnEveryRank) {
  const SharedFolder folder;
  StateDict state;
  state.add("good", torch::ones({2}));
  if (world_rank() == last_rank()) state.add("bad", torch::empty({2}, at::kMeta));
  EXPECT_THAT(error_of([&] { save(state, folder.path() / "c"); }),
              HasSubstr(c10::str("rank ", last_rank(), ": checkpoint: tensor \"bad\": a meta tensor has no data")));
  SharedFolder::barrier();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  SharedFolder::barrier();

  StateDict good;
  good.add("good", torch::ones({2}));
  save(good, folder.path() / "c");
  if (world_rank() == last_rank()) good.add("more", torch::ones({2}));
  EXPECT_THAT(
      error_of([&] { load(good, folder.path() / "c"); }),
      HasSubstr(c10::str("rank ", last_rank(), ": the state does not fit the checkpoint:\nnot in the checkpoint:\n  more")));
}

TEST(RanksCheckpoint, ADamagedFileIsNamedOnEveryRank) {
  const SharedFolder folder;
  StateDict state;
  state.add(c10::str("t", world_rank()), torch::ones({2}));
  save(state, folder.path() / "c");
  const auto file = c10::str("shard-0000", world_size(), "-model-00001-of-00001.safetensors");
  if (world_rank() == 0) {
    auto bytes = testing::read_text(folder.path() / "c" / file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    testing::write_text(folder.path() / "c" / file, bytes);
  }
  SharedFolder::barrier();
  const auto error = error_of([&] { load(state, folder.path() / "c"); });
  EXPECT_THAT(error, HasSubstr(c10::str("rank ", last_rank(), ": ")));
  EXPECT_THAT(error, HasSubstr(file + " is damaged: tensor \"t" + std::to_string(last_rank()) + "\""));
}

} // namespace
} // namespace tessera::checkpoint::ranks_test
