// Saves and loads by several ranks of state that is not sharded, and errors that only one rank meets.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/ranks.h>

#include "shared_folder.h"

namespace tessera::checkpoint {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::SharedFolder;

int rank() { return process_context().rank(); }
int world_size() { return process_context().world_size(); }
int last() { return world_size() - 1; }

TEST(Ranks, EveryRankGetsAllResults) {
  const auto results = Ranks().all("test", [] { return std::string(static_cast<size_t>(rank()), 'x') + std::string(1, '\0'); });
  ASSERT_EQ(results.size(), world_size());
  for (int r = 0; r < world_size(); ++r) EXPECT_EQ(results[r], std::string(r, 'x') + '\0');
}

TEST(Ranks, AnErrorOnOneIsAnErrorOnAll) {
  const auto error = error_of([] {
    Ranks().all("count", [] {
      TORCH_CHECK(rank() != last(), "no more");
      return std::string("fine");
    });
  });
  EXPECT_THAT(error, HasSubstr(c10::str("checkpoint: cannot count: rank ", last(), ": no more")));
  const auto of_all = error_of([] { Ranks().all("count", []() -> std::string { throw std::runtime_error("bad"); }); });
  for (int r = 0; r < world_size(); ++r) EXPECT_THAT(of_all, HasSubstr(c10::str("rank ", r, ": bad")));
}

TEST(RanksCheckpoint, PlainTensorsAreTheLowestRanks) {
  const SharedFolder folder;
  StateDict state;
  state.add("common", torch::full({3}, rank()));
  state.add(c10::str("of-rank-", rank()), torch::full({2}, rank()));
  state.set("step", 7);
  state.set(c10::str("rng-", rank()), rank());
  save(state, folder.path() / "c");
  const auto index = read_index(folder.path() / "c");
  EXPECT_EQ(index.world_size, world_size());
  EXPECT_EQ(index.tensors.size(), 1 + world_size());
  EXPECT_EQ(index.files.size(), world_size());

  StateDict all;
  all.add("common", torch::full({3}, -1, at::kLong));
  for (int r = 0; r < world_size(); ++r) {
    all.add(c10::str("of-rank-", r), torch::full({2}, -1, at::kLong));
    all.set(c10::str("rng-", r), -1);
  }
  all.set("step", 0);
  load(all, folder.path() / "c");
  EXPECT_TRUE(torch::equal(all.tensor("common"), torch::zeros({3}, at::kLong)));
  for (int r = 0; r < world_size(); ++r) {
    EXPECT_TRUE(torch::equal(all.tensor(c10::str("of-rank-", r)), torch::full({2}, r)));
    EXPECT_EQ(all.value<int64_t>(c10::str("rng-", r)), r);
  }
  EXPECT_EQ(all.value<int64_t>("step"), 7);
  // Unused by this rank, but not by all of them.
  StateDict own;
  own.add(c10::str("of-rank-", rank()), torch::full({2}, -1, at::kLong));
  own.set(c10::str("rng-", rank()), -1);
  own.set("step", 0);
  if (rank() == 0) own.add("common", torch::full({3}, -1, at::kLong));
  load(own, folder.path() / "c");
}

TEST(RanksCheckpoint, ValuesThatDifferAreAnErrorOnEveryRank) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const SharedFolder folder;
  StateDict state;
  state.set("step", rank() == last() ? 1 : 0);
  EXPECT_THAT(error_of([&] { save(state, folder.path() / "c"); }),
              HasSubstr(c10::str("value \"step\" is {\"i64\":0} on rank 0 and {\"i64\":1} on rank ", last())));
  SharedFolder::barrier(); // rank 0 removes what was begun
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RanksCheckpoint, AnOptionThatIsWrongOnOneRankIsAnErrorOnEveryRank) {
  const SharedFolder folder;
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "c", {.keep_last = rank() == last() ? -1 : 0}); }),
              HasSubstr(c10::str("rank ", last(), ": keep_last is -1")));
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "latest"); }), HasSubstr("rank 0: "));
  SharedFolder::barrier(); // rank 0 removes what was begun
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RanksCheckpoint, AFailureOfOneRankIsNamedOnEveryRank) {
  const SharedFolder folder;
  StateDict state;
  state.add("good", torch::ones({2}));
  if (rank() == last()) state.add("bad", torch::empty({2}, at::kMeta));
  EXPECT_THAT(error_of([&] { save(state, folder.path() / "c"); }),
              HasSubstr(c10::str("rank ", last(), ": checkpoint: tensor \"bad\": a meta tensor has no data")));
  SharedFolder::barrier();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  SharedFolder::barrier();

  StateDict good;
  good.add("good", torch::ones({2}));
  save(good, folder.path() / "c");
  if (rank() == last()) good.add("more", torch::ones({2}));
  EXPECT_THAT(error_of([&] { load(good, folder.path() / "c"); }),
              HasSubstr(c10::str("rank ", last(), ": the state does not fit the checkpoint:\nnot in the checkpoint:\n  more")));
}

TEST(RanksCheckpoint, ADamagedFileIsNamedOnEveryRank) {
  const SharedFolder folder;
  StateDict state;
  state.add(c10::str("t", rank()), torch::ones({2}));
  save(state, folder.path() / "c");
  const auto file = c10::str("shard-0000", world_size(), "-model-00001-of-00001.safetensors");
  if (rank() == 0) {
    auto bytes = testing::read_text(folder.path() / "c" / file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    testing::write_text(folder.path() / "c" / file, bytes);
  }
  SharedFolder::barrier();
  const auto error = error_of([&] { load(state, folder.path() / "c"); });
  EXPECT_THAT(error, HasSubstr(c10::str("rank ", last(), ": ")));
  EXPECT_THAT(error, HasSubstr(file + " is damaged: tensor \"t" + std::to_string(last()) + "\""));
}

} // namespace
} // namespace tessera::checkpoint
