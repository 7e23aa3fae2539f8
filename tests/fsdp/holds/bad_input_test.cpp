// What fully_shard refuses, and what it says.
#include <gtest/gtest.h>

#include <tessera/tests/fsdp/holds/compare_training.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Embeds : CaseModel {
  explicit Embeds(nn::EmbeddingOptions options)
      : embedding(register_module("embedding", nn::Embedding(options))), head(register_module("head", nn::Linear(4, 1))) {}
  Tensor loss(const Tensor& x) override { return head(embedding((x.abs() * 10).to(torch::kLong).remainder(5))).square().mean(); }
  nn::Embedding embedding;
  nn::Linear head;
};

TEST(BadInput, AnEmbeddingWithMaxNormIsRefusedInForward) {
  for (const auto& strategy : holds_strategies()) {
    Embeds model(nn::EmbeddingOptions(5, 4).max_norm(1));
    shard_case(model, {strategy.name, strategy.mesh,
                       [&] {
                         auto options = strategy.options;
                         options.initial_weights = InitialWeights::kBroadcast;
                         return options;
                       }(),
                       strategy.replicates});
    EXPECT_THROWS_WITH(model.loss(input_of(0, 0)), "the embedding embedding.weight has a max_norm");
  }
}

TEST(BadInput, ASparseGradientIsRefusedInBackward) {
  for (const auto& strategy : holds_strategies()) {
    torch::manual_seed(7);
    Embeds model(nn::EmbeddingOptions(5, 4).sparse(true));
    shard_case(model, strategy);
    EXPECT_THROWS_WITH(
        model.loss(input_of(0, 0)).backward(),
        "the parameter embedding.weight has a sparse gradient, which fully_shard cannot reduce; build its embedding "
        "with sparse(false)");
  }
}

TEST(BadInput, AForwardFromBeforeShardingCannotRunBackward) {
  for (const auto& strategy : holds_strategies()) {
    torch::manual_seed(7);
    nn::Linear linear(kWidth, 3);
    const auto loss = linear(input_of(0, 0)).sum();
    if (strategy.replicates) {
      replicate(*linear, strategy.mesh(), strategy.options);
    } else {
      fully_shard(linear, strategy.mesh(), strategy.options);
    }
    EXPECT_THROWS_WITH(loss.backward(), "comes from a forward that ran before fully_shard: run the forward again");
    EXPECT_FALSE(linear->weight.grad().defined());
    linear(input_of(0, 0)).sum().backward();
    EXPECT_TRUE(is_dtensor(linear->weight.grad()));
  }
}

/// Gives its weight up for another.
struct Replaceable : nn::Module {
  Replaceable()
      : weight(register_parameter("weight", torch::ones({kWidth}))), bias(register_parameter("bias", torch::ones({1}))) {}
  Tensor forward(const Tensor& x) { return (x * weight).sum() + bias; }
  void replace() {
    weight = torch::ones({kWidth}, torch::requires_grad());
    parameters_["weight"] = weight;
  }
  Tensor weight, bias;
};

TEST(BadInput, AReplacedParameterIsNamed) {
  for (const auto& strategy : holds_strategies()) {
    const auto model = std::make_shared<Replaceable>();
    const auto handle = strategy.replicates ? replicate(*model, strategy.mesh(), strategy.options)
                                            : fully_shard(*model, strategy.mesh(), strategy.options);
    model->forward(input_of(0, 0)).sum().backward();
    model->replace();
    EXPECT_THROWS_WITH(model->forward(input_of(0, 0)), "the sharded parameter weight of tessera::testing::");
  }
}

TEST(BadInput, BatchesOfOtherSizesOnEachRankTrain) {
  for (const auto& strategy : holds_strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::manual_seed(7);
    nn::Linear plain(kWidth, 3), linear(kWidth, 3);
    torch::manual_seed(7);
    linear->reset_parameters();
    torch::manual_seed(7);
    plain->reset_parameters();
    strategy.replicates ? replicate(*linear, strategy.mesh(), strategy.options)
                        : fully_shard(linear, strategy.mesh(), strategy.options);
    const auto batch_of = [](int64_t rank) { return torch::full({rank, kWidth}, 0.5); }; // none on rank 0
    linear(batch_of(world_rank())).sum().backward();
    for (int64_t rank = 0; rank < world_size(); ++rank) (plain(batch_of(rank)).sum() / world_size()).backward();
    EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), plain->weight.grad());
  }
}

} // namespace
} // namespace tessera::testing
