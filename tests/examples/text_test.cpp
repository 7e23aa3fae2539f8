#include <gmock/gmock.h>
#include <gpt/text.h>
#include <torch/torch.h>

#include <cmath>

#include "../support/matchers.h"
#include "../support/temporary_folder.h"

namespace gpt::text_test {
namespace {

using tessera::testing::error_of;
using tessera::testing::TemporaryFolder;
using ::testing::HasSubstr;

std::string alphabet(int64_t size) {
  std::string text;
  for (int64_t i = 0; i < size; ++i) text.push_back(static_cast<char>(i % 251));
  return text;
}

TEST(Text, TargetsAreTheBytesAfterTheInputs) {
  TemporaryFolder folder;
  const Text text(folder.write("text", alphabet(5000)), 16, 1);
  const auto batch = text.training_batch(3, 0, 5);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{5, 16}));
  EXPECT_EQ(batch.targets.sizes(), (std::vector<int64_t>{5, 16}));
  EXPECT_EQ(batch.inputs.scalar_type(), torch::kLong);
  EXPECT_TRUE(torch::equal((batch.inputs + 1).remainder(251), batch.targets));
}

TEST(Text, RowsDoNotDependOnHowManyRanksShareThem) {
  TemporaryFolder folder;
  const Text text(folder.write("text", alphabet(5000)), 16, 1);
  for (const int64_t ranks : {1, 2, 3, 4, 6, 12}) {
    std::vector<torch::Tensor> parts;
    for (int64_t rank = 0; rank < ranks; ++rank) parts.push_back(text.training_batch(7, rank * 12 / ranks, 12 / ranks).inputs);
    EXPECT_TRUE(torch::equal(torch::cat(parts), text.training_batch(7, 0, 12).inputs)) << ranks << " ranks";
  }
}

TEST(Text, StepsSeedsAndPartsDiffer) {
  TemporaryFolder folder;
  const auto path = folder.write("text", alphabet(200000));
  const Text text(path, 16, 1);
  const auto first = text.training_batch(0, 0, 8).inputs;
  EXPECT_TRUE(torch::equal(first, Text(path, 16, 1).training_batch(0, 0, 8).inputs));
  EXPECT_FALSE(torch::equal(first, text.training_batch(1, 0, 8).inputs));
  EXPECT_FALSE(torch::equal(first, Text(path, 16, 2).training_batch(0, 0, 8).inputs));
  EXPECT_FALSE(torch::equal(first, text.validation_batch(0, 0, 8).inputs));
}

// The last twentieth is all 'b': training never sees one, validation nothing else.
TEST(Text, TrainingNeverSeesTheValidationPart) {
  TemporaryFolder folder;
  const Text text(folder.write("text", std::string(1900, 'a') + std::string(100, 'b')), 32, 1);
  EXPECT_TRUE(text.training_batch(0, 0, 500).targets.eq('a').all().item<bool>());
  EXPECT_TRUE(text.validation_batch(0, 0, 500).inputs.eq('b').all().item<bool>());
  EXPECT_TRUE(text.validation_batch(0, 0, 500).targets.eq('b').all().item<bool>());
}

TEST(Text, ReachesEveryPlace) {
  TemporaryFolder folder;
  const Text text(folder.write("text", alphabet(40)), 1, 1); // 38 bytes for training: 37 windows of two bytes
  const auto starts = std::get<0>(at::_unique(text.training_batch(0, 0, 5000).inputs));
  EXPECT_TRUE(torch::equal(starts, torch::arange(37)));
}

TEST(Text, UnigramEntropy) {
  TemporaryFolder folder;
  EXPECT_DOUBLE_EQ(Text(folder.write("one", std::string(100, 'x')), 1, 1).unigram_entropy(), 0.0);
  std::string two;
  for (int i = 0; i < 100; ++i) two += i % 2 ? 'x' : 'y';
  EXPECT_DOUBLE_EQ(Text(folder.write("two", two), 1, 1).unigram_entropy(), std::log(2.0));
}

TEST(Text, MissingFile) {
  EXPECT_EQ(error_of([] { Text("/nowhere/text.txt", 16, 1); }),
            "the data file /nowhere/text.txt does not exist; scripts/setup makes .data/text.txt");
}

TEST(Text, NoRegularFile) {
  EXPECT_EQ(error_of([] { Text("/", 16, 1); }), "the data file / is no regular file");
}

TEST(Text, TooShort) {
  TemporaryFolder folder;
  const auto path = folder.write("short", std::string(339, 'x'));
  EXPECT_EQ(error_of([&] { Text(path, 16, 1); }),
            "the data file " + path +
                " has 339 bytes; with --sequence 16 it needs at least 340 (a twentieth of it "
                "is for validation)");
  EXPECT_EQ(error_of([&] { Text(folder.write("enough", std::string(340, 'x')), 16, 1); }), "no error");
  EXPECT_THAT(error_of([&] { Text(folder.write("empty", ""), 16, 1); }), HasSubstr("has 0 bytes"));
}

} // namespace
} // namespace gpt::text_test
