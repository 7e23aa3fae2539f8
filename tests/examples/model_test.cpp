#include <common/memory.h>
#include <gmock/gmock.h>
#include <gpt/model.h>
#include <gpt/sampling.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "../support/matchers.h"

namespace gpt::model_test {
namespace {

constexpr ModelConfig kSmall{.layers = 2, .width = 24, .heads = 3, .sequence = 10};

TEST(Gpt, ParameterCount) {
  Gpt model(kSmall);
  const int64_t block = 2 * 2 * 24 + (24 + 1) * 72 + (24 + 1) * 24 + (24 + 1) * 96 + (96 + 1) * 24;
  EXPECT_EQ(examples::parameter_count(*model), 256 * 24 + 10 * 24 + 2 * block + 2 * 24);
}

TEST(Gpt, StartsAtTheEntropyOfGuessing) {
  torch::manual_seed(3);
  Gpt model(kSmall);
  const auto tokens = torch::randint(kVocabulary, {8, 11}, torch::kLong);
  const auto loss = cross_entropy(model->forward(tokens.narrow(1, 0, 10)), tokens.narrow(1, 1, 10)).item<double>();
  EXPECT_NEAR(loss, std::log(256.0), 0.05);
}

TEST(Gpt, IsCausal) {
  torch::manual_seed(3);
  Gpt model(kSmall);
  const auto tokens = torch::randint(kVocabulary, {2, 10}, torch::kLong);
  auto changed = tokens.clone();
  changed.narrow(1, 6, 4).add_(1).remainder_(kVocabulary);
  const auto before = model->forward(tokens), after = model->forward(changed);
  EXPECT_TRUE(torch::allclose(before.narrow(1, 0, 6), after.narrow(1, 0, 6), 1e-5, 1e-6));
  EXPECT_FALSE(torch::allclose(before.narrow(1, 6, 4), after.narrow(1, 6, 4), 1e-5, 1e-6));
}

TEST(Gpt, EveryParameterHasAGradient) {
  Gpt model(kSmall);
  const auto tokens = torch::randint(kVocabulary, {2, 10}, torch::kLong);
  cross_entropy(model->forward(tokens), tokens).backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<float>(), 0) << item.key();
  }
}

TEST(Gpt, LearnsARepeatedText) {
  torch::manual_seed(3);
  Gpt model(kSmall);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto tokens = torch::arange(11).expand({4, 11});
  double loss = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const auto value = cross_entropy(model->forward(tokens.narrow(1, 0, 10)), tokens.narrow(1, 1, 10));
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.1);
}

TEST(Gpt, Errors) {
  const ModelConfig uneven{.layers = 1, .width = 10, .heads = 3, .sequence = 4};
  EXPECT_THROWS_WITH(Gpt{uneven}, "the model's width (10) must be a multiple of its heads (3)");
  Gpt model(kSmall);
  EXPECT_THROWS_WITH(model->forward(torch::zeros({1, 11}, torch::kLong)),
                     "a context of 11 bytes, but the model has positions for ");
}

TEST(Sampling, BeginsWithThePromptAndRepeats) {
  torch::manual_seed(3);
  Gpt model(kSmall);
  const auto text = sample(model, "Ab", torch::kCPU, {.bytes = 30, .seed = 5});
  EXPECT_EQ(text.size(), 32u);
  EXPECT_EQ(text.substr(0, 2), "Ab");
  EXPECT_EQ(text, sample(model, "Ab", torch::kCPU, {.bytes = 30, .seed = 5}));
  EXPECT_NE(text, sample(model, "Ab", torch::kCPU, {.bytes = 30, .seed = 6}));
  EXPECT_THROWS_WITH(sample(model, "", torch::kCPU, {}), "sampling needs a prompt of at least one byte");
}

TEST(Sampling, Printable) {
  EXPECT_EQ(printable("a\nb ~"), "a\nb ~");
  EXPECT_EQ(printable("\x1b[31m\xc3\xa9\t"), "?[31m???");
}

} // namespace
} // namespace gpt::model_test
