// What a checkpoint holds, read by a program that does not know it.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::checkpoint::read_state_dict_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::line_mesh;
using testing::SharedFolder;
using testing::Training;
using testing::whole_tensor;

const std::filesystem::path kDistcp = std::filesystem::path(TESSERA_FIXTURES) / "distcp";

int64_t local_rows(int64_t rows) {
  const int64_t n = process_context().world_size(), each = (rows + n - 1) / n;
  return std::clamp<int64_t>(rows - each * process_context().rank(), 0, each);
}

TEST(ReadStateDict, HoldsWhatWasSavedPlainOrSharded) {
  const SharedFolder folder;
  Training training("full-ragged", 1);
  training.step(0);
  auto saved = training.state();
  saved.set("step", 7);
  saved.add("halves", torch::arange(6).view({2, 3}).to(at::kBFloat16));
  saved.add("empty", torch::zeros({0, 3}));
  save(saved, folder.path() / "c");

  const auto plain = read_state_dict(folder.path() / "c");
  testing::expect_same(plain, saved);
  EXPECT_FALSE(is_dtensor(plain.tensor("embed.weight")));
  EXPECT_TRUE(plain.tensor("embed.weight").is_same(plain.tensor("head"))); // tied

  const auto mesh = line_mesh();
  const auto sharded = read_state_dict(folder.path() / "c", {.mesh = mesh});
  testing::expect_same(sharded, saved);
  const DTensor embed(sharded.tensor("embed.weight"));
  EXPECT_EQ(embed.placements(), Placements{Shard{0}});
  EXPECT_EQ(embed.local().size(0), local_rows(11));
  EXPECT_EQ(DTensor(sharded.tensor("scale")).placements(), Placements{Replicate{}});

  const auto columns = read_state_dict(folder.path() / "c", {.prefix = "embed.", .mesh = mesh, .placements = {Shard{1}}});
  EXPECT_EQ(columns.size(), 1);
  EXPECT_EQ(DTensor(columns.tensor("embed.weight")).local().size(1), local_rows(7));
  EXPECT_TENSORS_EQUAL(whole_tensor(columns.tensor("embed.weight")), whole_tensor(saved.tensor("embed.weight")));
}

TEST(ReadStateDict, ReadsTheFormatsOfOthers) {
  const SharedFolder folder;
  Training training("full-ragged", 2);
  const auto model = state_dict(training.model);
  save_hugging_face(model, folder.path() / "hf");
  for (const auto& path : {folder.path() / "hf", folder.path() / "hf" / "model.safetensors"}) {
    for (const auto& mesh : {std::optional<DeviceMesh>(), std::optional(line_mesh())}) {
      const auto read = read_state_dict(path, {.mesh = mesh});
      ASSERT_EQ(read.size(), model.size());
      for (const auto& entry : read.entries())
        EXPECT_TENSORS_EQUAL(whole_tensor(read.tensor(entry.name)), whole_tensor(model.tensor(entry.name)));
    }
  }
  for (const auto& mesh : {std::optional<DeviceMesh>(), std::optional(line_mesh())}) {
    const auto read = read_state_dict(kDistcp, {.mesh = mesh});
    EXPECT_TENSORS_EQUAL(whole_tensor(read.tensor("a")), torch::arange(15.).view({5, 3}));
    EXPECT_TENSORS_EQUAL(whole_tensor(read.tensor("b")), torch::arange(15).view({3, 5}).to(at::kBFloat16));
    EXPECT_EQ(whole_tensor(read.tensor("s")).item<double>(), 2.5);
    EXPECT_EQ(read.value<int64_t>("step"), 7);
    EXPECT_EQ(read.value<double>("nested.rate"), 0.5);
    EXPECT_EQ(read_state_dict(kDistcp, {.prefix = "nested.list", .mesh = mesh}).size(), 2);
  }
}

TEST(ReadStateDict, EachRankReadsItsPart) {
  const SharedFolder folder;
  const int64_t n = process_context().world_size(), rows = 64 * n;
  StateDict saved;
  saved.add("w", distribute_tensor(torch::arange(rows * 4096.f).view({rows, 4096}), line_mesh(), {Shard{0}}));
  save(saved, folder.path() / "c");
  const auto read = read_state_dict(folder.path() / "c", {.mesh = line_mesh()});
  EXPECT_EQ(DTensor(read.tensor("w")).local().numel(), 64 * 4096);
  EXPECT_TENSORS_EQUAL(DTensor(read.tensor("w")).local(), DTensor(saved.tensor("w")).local());
  // A damaged part is an error on every rank, also on those that do not read it.
  SharedFolder::barrier();
  if (process_context().rank() == 0) {
    const auto path = folder.path() / "c" / "shard-00001-model-00001-of-00001.safetensors";
    auto bytes = testing::read_text(path);
    bytes.back() ^= 1;
    testing::write_text(path, bytes);
  }
  SharedFolder::barrier();
  EXPECT_THAT(
      error_of([&] { read_state_dict(folder.path() / "c", {.mesh = line_mesh()}); }),
      HasSubstr("rank 0: " + (folder.path() / "c" / "shard-00001-model-00001-of-00001.safetensors").string() + " is damaged"));
}

TEST(ReadStateDict, TensorsSavedForEachRankAreThisRanks) {
  const SharedFolder folder;
  const auto rank = process_context().rank();
  StateDict saved;
  saved.add("rng", torch::full({3}, rank));
  save(saved, folder.path() / "c", {.differing_tensors = DifferingTensors::kEachRank});
  const auto read = read_state_dict(folder.path() / "c");
  EXPECT_EQ(read.size(), 1);
  EXPECT_EQ(read.tensor("rng")[0].item<int64_t>(), rank);
  EXPECT_EQ(whole_tensor(read_state_dict(folder.path() / "c", {.mesh = line_mesh()}).tensor("rng"))[0].item<int64_t>(), 0);
}

TEST(ReadStateDict, OptionsThatDifferBetweenRanksAreAnError) {
  const int last = process_context().world_size() - 1;
  if (last == 0) GTEST_SKIP() << "one rank cannot differ";
  const bool odd = process_context().rank() == last;
  const auto mesh = line_mesh();
  const auto columns = odd ? Placements{Shard{1}} : Placements{Shard{0}};
  const std::vector<std::pair<std::string, ReadOptions>> cases{
      {", what begins with \"a\"", {.prefix = odd ? "a" : ""}},
      {", on " + mesh.to_string(), {.mesh = odd ? std::optional(mesh) : std::nullopt}},
      {" as (Shard(1))", {.prefix = "a", .mesh = mesh, .placements = columns}}};
  for (const auto& [text, options] : cases) {
    const auto error = error_of([&, options = options] { read_state_dict(kDistcp, options); });
    EXPECT_THAT(error, HasSubstr(c10::str("\nrank ", last, ": read ", kDistcp.string())));
    EXPECT_THAT(error, HasSubstr(text));
  }
  EXPECT_EQ(read_state_dict(kDistcp, {.mesh = mesh}).tensor("a").size(0), 5); // the next call works
}

TEST(ReadStateDict, BadInputIsAnErrorOnEveryRank) {
  const SharedFolder folder;
  const auto mesh = line_mesh();
  const auto error = [&](const std::filesystem::path& path, const ReadOptions& options) {
    return error_of([&] { read_state_dict(path, options); });
  };
  EXPECT_THAT(error(folder.path() / "none", {}), HasSubstr("is not a checkpoint: no such folder"));
  EXPECT_THAT(error(kDistcp, {.prefix = "x."}), HasSubstr("it holds nothing whose name begins with \"x.\""));
  EXPECT_THAT(error(kDistcp, {.placements = {Shard{0}}}), HasSubstr("placements are given without a mesh"));
  EXPECT_THAT(error(kDistcp, {.mesh = mesh, .placements = {Shard{0}, Shard{0}}}), HasSubstr("2 placements for a mesh of 1 dims"));
  EXPECT_THAT(error(kDistcp, {.mesh = mesh, .placements = {Shard{1}}}), HasSubstr("tensor \"r\": "));
  EXPECT_THAT(error(kDistcp, {.mesh = DeviceMesh()}), HasSubstr("is undefined"));
  EXPECT_THAT(error(kDistcp, {.mesh = mesh, .placements = {Partial{}}}), HasSubstr("\"a\""));
}

} // namespace
} // namespace tessera::checkpoint::read_state_dict_test
