// Losses of logits that a plan split over the vocabulary.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/parallel/split_logits.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace tessera::testing::loss_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

/// A head on `rows` rows, split and in one process.
struct Heads {
  explicit Heads(int64_t vocabulary, int64_t rows) {
    torch::manual_seed(8);
    split = nn::Linear(6, vocabulary);
    torch::manual_seed(8);
    plain = nn::Linear(6, vocabulary);
    for (auto* head : {&split, &plain}) (*head)->to(torch::kDouble);
    parallelize(*split, tensor_mesh(), {{"", VocabParallel{}}});
    x = torch::randn({rows, 6}, torch::kDouble);
    targets = torch::randint(vocabulary, {rows}, torch::kLong);
  }

  void compare(const std::function<Tensor(const Tensor& logits)>& loss) {
    for (auto* head : {&split, &plain}) (*head)->zero_grad();
    const auto input = x.clone().requires_grad_(), expected_input = x.clone().requires_grad_();
    const auto expected = loss(plain(expected_input)), actual = loss(split(input));
    EXPECT_TENSORS_CLOSE(whole_of(actual), expected.detach(), 1e-11, 1e-12);
    expected.sum().backward();
    actual.sum().backward();
    EXPECT_TENSORS_CLOSE(input.grad(), expected_input.grad(), 1e-10, 1e-12);
    EXPECT_TENSORS_CLOSE(whole_of(split->weight.grad()), plain->weight.grad(), 1e-10, 1e-12);
    EXPECT_TENSORS_CLOSE(whole_of(split->bias.grad()), plain->bias.grad(), 1e-10, 1e-12);
  }

  nn::Linear split{nullptr}, plain{nullptr};
  Tensor x, targets;
};

TEST(ParallelLoss, CrossEntropyWithEveryOption) {
  const StrictSharding strict;
  for (const int64_t vocabulary : {12, 13, 3, 1}) { // 3 and 1: some of 4 ranks have no class
    for (const int64_t rows : {5, 1}) {
      Heads heads(vocabulary, rows);
      const auto weights = torch::rand({vocabulary}, torch::kDouble) + 0.1;
      auto ignored = heads.targets.clone();
      if (rows > 1) ignored.slice(0, 1, 3).fill_(-7);
      for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
        for (const double smoothing : {0.0, 0.2}) {
          for (const auto& weight : std::vector<Tensor>{{}, weights}) {
            SCOPED_TRACE(c10::str(vocabulary, " classes, ", rows, " rows, reduction ", reduction, ", smoothing ", smoothing,
                                  weight.defined() ? ", weights" : ""));
            heads.compare([&](const Tensor& logits) {
              return torch::cross_entropy_loss(logits, ignored, weight, reduction, /*ignore_index=*/-7, smoothing);
            });
          }
        }
      }
    }
  }
}

/// The gradient of the logits, differentiated again: a penalty on its size.
TEST(ParallelLoss, HasASecondDerivative) {
  for (const int64_t vocabulary : {12, 13, 3}) {
    Heads heads(vocabulary, 5);
    auto ignored = heads.targets.clone();
    ignored[2] = -100;
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      heads.compare([&](const Tensor& logits) {
        const auto loss = torch::cross_entropy_loss(logits.tanh(), ignored, {}, reduction).sum();
        const auto gradient = torch::autograd::grad({loss}, {logits}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
        return loss * 0.3 + gradient.square().sum();
      });
    }
  }
}

/// In a row the gradient sums up to that of the loss, which every rank has.
TEST(ParallelLoss, BackwardSendsNothing) {
  Heads heads(13, 5);
  const auto logits = heads.split(heads.x).detach().requires_grad_();
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
    const auto loss = torch::cross_entropy_loss(logits, heads.targets, {}, reduction).sum();
    const CountCollectives counter;
    loss.backward();
    EXPECT_EQ(counter.total_calls(), 0);
  }
}

TEST(ParallelLoss, LogProbabilitiesHaveTheirGradient) {
  Heads heads(13, 5);
  heads.compare([&](const Tensor& logits) { return torch::log_softmax(logits, -1).gather(1, heads.targets.unsqueeze(1)); });
  heads.compare([&](const Tensor& logits) { return torch::softmax(logits, -1).square(); });
  heads.compare([&](const Tensor& logits) { return torch::logsumexp(logits, -1); });
}

TEST(ParallelLoss, OfGatheredLogitsIsTheSame) {
  Heads heads(13, 5);
  heads.compare([&](const Tensor& logits) {
    const auto whole = is_dtensor(logits) ? DTensor(logits).full_tensor() : logits;
    return torch::cross_entropy_loss(whole, heads.targets);
  });
}

TEST(ParallelLoss, TheLargestIsThatOfTheWholeVocabulary) {
  const torch::NoGradGuard no_grad;
  for (const int64_t vocabulary : {12, 13, 1}) {
    Heads heads(vocabulary, 6);
    const auto logits = heads.split(heads.x), plain = heads.plain(heads.x);
    EXPECT_TENSORS_EQUAL(whole_of(logits.argmax(-1)), plain.argmax(-1));
    EXPECT_TENSORS_CLOSE(whole_of(logits.amax(-1)), plain.amax(-1), 1e-12);
    EXPECT_TENSORS_EQUAL(whole_of(std::get<1>(logits.topk(1, -1))), std::get<1>(plain.topk(1, -1)));
  }
}

TEST(ParallelLoss, LogProbabilitiesTakePlainClasses) {
  const auto whole = torch::arange(28).view({4, 7}).sin();
  const auto classes = torch::tensor({0, 3, 6, 2});
  const Tensor logits = distribute_tensor(whole, line_mesh(), {Shard{1}});
  const auto expected = torch::log_softmax(whole, -1).gather(1, classes.unsqueeze(1)).view({4});
  EXPECT_TENSORS_CLOSE(whole_of(log_probabilities(logits, classes)), expected, 1e-5, 1e-6);
}

/// Of what is computed of them, weighed and squared, alone and in a batch.
TEST(ParallelLoss, LogProbabilitiesOfClassesSendNumbersOfRows) {
  const StrictSharding strict;
  for (const int64_t vocabulary : {13, 3, 1}) {
    Heads heads(vocabulary, 6);
    const auto advantages = torch::randn({2, 3}, torch::kDouble);
    const auto classes = heads.targets.view({2, 3});
    heads.compare([&](const Tensor& logits) {
      const auto expected = torch::log_softmax(whole_of(logits), -1).gather(1, heads.targets.unsqueeze(1)).view({2, 3});
      const CountCollectives counter;
      const auto logarithms = log_probabilities(logits.view({2, 3, vocabulary}), classes);
      EXPECT_EQ(counter.total_calls(), world_size() > 1 && is_dtensor(logits) ? 3 : 0) << counter.to_string();
      EXPECT_TENSORS_CLOSE(whole_of(logarithms), expected, 1e-11, 1e-12);
      return (logarithms * advantages).exp() + logarithms.square();
    });
  }
  const auto logits = torch::randn({7});
  EXPECT_TENSORS_CLOSE(log_probabilities(logits, torch::tensor(3)), torch::log_softmax(logits, 0)[3], 1e-6);
  EXPECT_THROWS_WITH(log_probabilities(logits, torch::zeros({2}, torch::kLong)), "log_probabilities: classes [2] of logits [7]");
}

TEST(ParallelLoss, TheLargestAreFoundWithoutGathering) {
  const StrictSharding strict;
  for (const int64_t vocabulary : {12, 13, 3, 1}) {
    Heads heads(vocabulary, 6);
    const auto logits = heads.split(heads.x).view({2, 3, vocabulary}), plain = heads.plain(heads.x).view({2, 3, vocabulary});
    for (const int64_t k : {int64_t{1}, std::min<int64_t>(5, vocabulary), vocabulary}) {
      const CountCollectives counter;
      const auto [values, classes] = largest_logits(logits, k);
      if (world_size() > 1) {
        EXPECT_EQ(counter.count(CollectiveKind::kAllGather), (CollectiveCounters::Count{2, world_size() * 6 * k * (8 + 8)}));
        EXPECT_EQ(counter.total_calls(), 2);
      }
      const auto [expected, expected_classes] = plain.topk(k, -1);
      EXPECT_TENSORS_CLOSE(whole_of(values), expected.detach(), 1e-12);
      EXPECT_TENSORS_EQUAL(whole_of(classes), expected_classes);
      EXPECT_FALSE(values.requires_grad());
    }
  }
  // The first of equal ones, and numbers that are none.
  auto rows = torch::zeros({3, 9});
  rows[1][7] = rows[1][2] = 4;
  rows[2][5] = std::numeric_limits<float>::quiet_NaN();
  const auto split = distribute_tensor(rows, tensor_mesh(), {Shard{1}});
  EXPECT_TENSORS_EQUAL(whole_of(largest_logits(split, 1).classes), torch::tensor({0, 2, 5}).view({3, 1}));
  const auto by_rows = distribute_tensor(rows, tensor_mesh(), {Shard{0}});
  EXPECT_TENSORS_EQUAL(whole_of(largest_logits(by_rows, 1).classes), torch::tensor({0, 2, 5}).view({3, 1}));
  EXPECT_THROWS_WITH(largest_logits(split, 10), "largest_logits: the 10 largest of 9 classes");
  EXPECT_THROWS_WITH(largest_logits(split.to(torch::kLong), 1), "logits are floating-point numbers");
  if (world_size() > 1)
    EXPECT_THROWS_WITH(largest_logits(from_local(rows, tensor_mesh(), {Partial{}}), 1), "not as Shard or Replicate");
}

/// Ranks with one seed draw what one process draws, as often as the probabilities say.
TEST(ParallelLoss, SamplesAreThoseOfOneProcess) {
  for (const int64_t vocabulary : {12, 13, 3}) {
    Heads heads(vocabulary, 6);
    const auto logits = heads.split(heads.x), plain = heads.plain(heads.x).detach();
    for (const SampleOptions& options : std::vector<SampleOptions>{
             {}, {.temperature = 0.5}, {.temperature = 0}, {.temperature = 1e-40}, {.temperature = 1e-300}, {.top_k = 2}}) {
      torch::manual_seed(31);
      const auto expected = sample_logits(plain, options);
      torch::manual_seed(31);
      const auto drawn = sample_logits(logits, options);
      EXPECT_EQ(drawn.sizes(), torch::IntArrayRef({6}));
      EXPECT_TENSORS_EQUAL(whole_of(drawn), expected);
      if (options.temperature < 1e-30) EXPECT_TENSORS_EQUAL(expected, plain.argmax(-1));
      if (options.top_k == 2) {
        const auto allowed = std::get<1>(plain.topk(2, -1)).eq(expected.unsqueeze(1)).any(1);
        EXPECT_TRUE(allowed.all().item<bool>());
      }
    }
  }
  const auto weights = torch::tensor({0.1, 0.2, 0.7}, torch::kDouble);
  const auto rows = weights.log().expand({20000, 3});
  torch::manual_seed(32);
  const auto shares = torch::bincount(sample_logits(rows), {}, 3).to(torch::kDouble) / 20000;
  EXPECT_TENSORS_CLOSE(shares, weights, 0, 0.02); // six deviations
  EXPECT_THROWS_WITH(sample_logits(rows, {.temperature = -1}), "sample_logits: the temperature is -1");
}

TEST(ParallelLoss, ATargetOutsideTheVocabularyIsAnError) {
  Heads heads(12, 5);
  heads.targets.fill_(12);
  EXPECT_ANY_THROW(torch::cross_entropy_loss(heads.split(heads.x), heads.targets));
}

} // namespace
} // namespace tessera::testing::loss_test
