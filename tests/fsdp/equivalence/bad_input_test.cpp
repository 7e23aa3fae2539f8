// What fully_shard refuses, and what it says.
#include <gtest/gtest.h>

#include <tessera/fsdp/meta_init.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing::bad_input_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

Tensor own_input() { return input_of(0, 0).to(test_device()); }

struct Embeds : CaseModel {
  explicit Embeds(nn::EmbeddingOptions options)
      : embedding(register_module("embedding", nn::Embedding(options))), head(register_module("head", nn::Linear(4, 1))) {}
  Tensor loss(const Tensor& x) override { return head(embedding((x.abs() * 10).to(torch::kLong).remainder(5))).square().mean(); }
  nn::Embedding embedding;
  nn::Linear head;
};

TEST(BadInput, AnEmbeddingWithMaxNormIsRefusedInForward) {
  for (const auto& strategy : equivalence_strategies()) {
    Embeds model(nn::EmbeddingOptions(5, 4).max_norm(1));
    shard_case(model, {strategy.name, strategy.mesh,
                       [&] {
                         auto options = strategy.options;
                         options.initial_weights = InitialWeights::kBroadcast;
                         return options;
                       }(),
                       strategy.replicates});
    EXPECT_THROWS_WITH(model.loss(model.input_of(0, 0)), "the embedding embedding.weight has a max_norm");
  }
}

TEST(BadInput, ASparseGradientIsRefusedInBackward) {
  if (test_device_type() == sim::kDeviceType) GTEST_SKIP() << "the simulated device has no sparse tensors";
  for (const auto& strategy : equivalence_strategies()) {
    torch::manual_seed(7);
    Embeds model(nn::EmbeddingOptions(5, 4).sparse(true));
    shard_case(model, strategy);
    EXPECT_THROWS_WITH(
        model.loss(model.input_of(0, 0)).backward(),
        "the parameter embedding.weight has a sparse gradient, which fully_shard cannot reduce; build its embedding "
        "with sparse(false)");
  }
}

TEST(BadInput, AForwardFromBeforeShardingCannotRunBackward) {
  for (const auto& strategy : equivalence_strategies()) {
    torch::manual_seed(7);
    nn::Linear linear(kWidth, 3);
    linear->to(test_device());
    const auto loss = linear(own_input()).sum();
    if (strategy.replicates) {
      replicate(*linear, strategy.mesh(), strategy.options);
    } else {
      fully_shard(linear, strategy.mesh(), strategy.options);
    }
    EXPECT_THROWS_WITH(loss.backward(), "comes from a forward that ran before fully_shard: run the forward again");
    EXPECT_FALSE(linear->weight.grad().defined());
    linear(own_input()).sum().backward();
    EXPECT_TRUE(is_dtensor(linear->weight.grad()));
  }
}

struct Inner : nn::Module {
  Inner() : inner(register_module("inner", nn::Linear(8, 8))) {}
  nn::Linear inner;
};

struct NestedLayers : CaseModel {
  NestedLayers()
      : a(register_module("a", nn::Linear(kWidth, 8))),
        b(register_module("b", std::make_shared<Inner>())),
        head(register_module("head", nn::Linear(8, 1))) {}
  Tensor loss(const Tensor& x) override { return head(b->inner(a(x).tanh()).tanh()).square().mean(); }
  nn::Linear a;
  std::shared_ptr<Inner> b;
  nn::Linear head;
};

/// Gives its weight up for another.
struct Replaceable : nn::Module {
  Replaceable()
      : weight(register_parameter("weight", torch::ones({kWidth}))), bias(register_parameter("bias", torch::ones({1}))) {}
  Tensor forward(const Tensor& x) { return (x * weight).sum() + bias; }
  void replace() {
    weight = torch::ones({kWidth}, torch::requires_grad().device(test_device()));
    parameters_["weight"] = weight;
  }
  Tensor weight, bias;
};

TEST(BadInput, AReplacedParameterIsNamed) {
  for (const auto& strategy : equivalence_strategies()) {
    const auto model = std::make_shared<Replaceable>();
    const auto handle = strategy.replicates ? replicate(*model, strategy.mesh(), strategy.options)
                                            : fully_shard(*model, strategy.mesh(), strategy.options);
    model->forward(own_input()).sum().backward();
    model->replace();
    EXPECT_THROWS_WITH(model->forward(own_input()), "the sharded parameter weight of tessera::testing::");
  }
}

TEST(BadInput, AParameterRegisteredAfterShardingIsNamed) {
  for (const auto& strategy : equivalence_strategies()) {
    const auto model = sharded_case<NestedLayers>(strategy);
    model->b->inner = model->b->replace_module("inner", nn::Linear(8, 8));
    model->b->inner->to(test_device());
    EXPECT_THROWS_WITH(model->loss(model->input_of(0, 0)),
                       "the parameter b.inner.weight of tessera::testing::bad_input_test::(anonymous namespace)::NestedLayers "
                       "was registered after "
                       "fully_shard, and its gradients would differ between the ranks: register it first, call fully_shard on "
                       "its module as well, or set requires_grad_(false)");
    for (auto& parameter : model->b->inner->parameters()) parameter.requires_grad_(false);
    model->loss(model->input_of(0, 0)).backward();
  }
}

/// In each forward, until the new parameter is frozen.
void expect_names_new_parameter(CaseModel& model) {
  const auto adapter = model.register_module("adapter", nn::Linear(8, 8));
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THROWS_WITH(model.loss(model.input_of(0, 0)), "the parameter adapter.weight of ");
  for (auto& parameter : adapter->parameters()) parameter.requires_grad_(false);
  model.loss(model.input_of(0, 0));
}

/// Also where no read expects a gradient.
TEST(BadInput, AParameterRegisteredAfterAnEvaluationIsNamedBesideFrozenOnes) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<NestedLayers>(strategy);
    for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
    {
      const torch::NoGradGuard no_grad;
      model->loss(model->input_of(0, 0));
    }
    expect_names_new_parameter(*model);
  }
}

TEST(BadInput, AParameterRegisteredAfterAForwardWithoutBackwardIsNamed) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const bool is_frozen : {false, true}) {
      SCOPED_TRACE(strategy.name + (is_frozen ? ", frozen" : ""));
      const auto model = sharded_case<NestedLayers>(strategy);
      for (auto& parameter : model->parameters()) parameter.requires_grad_(!is_frozen);
      model->loss(model->input_of(0, 0));
      expect_names_new_parameter(*model);
    }
  }
}

/// Each of its forwards reads one of the two parameters of its first group.
struct Branching : CaseModel {
  Branching() : branches(register_module("branches", nn::ParameterList())), head(register_module("head", nn::Linear(kWidth, 1))) {
    for (int i = 0; i < 2; ++i) branches->append(torch::randn({kWidth}).requires_grad_());
  }
  Tensor loss(const Tensor& x) override { return head(x * branches[static_cast<size_t>(branch)]).square().mean(); }
  nn::ParameterList branches;
  nn::Linear head;
  int64_t branch = 0;
};

TEST(BadInput, ARegisteredParameterIsNamedOnRanksThatReadOthersOfTheirGroup) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Branching>(strategy);
    model->loss(model->input_of(0, 0));
    model->register_module("adapter", nn::Linear(8, 8));
    model->branch = world_rank() % 2;
    EXPECT_THROWS_WITH(model->loss(model->input_of(0, 0)), "the parameter adapter.weight of ");
  }
}

TEST(BadInput, ParametersThatShareMemoryAreNamed) {
  const auto flat = torch::randn({20});
  nn::Module apart, together, with_buffer;
  apart.register_parameter("a", flat.slice(0, 0, 10));
  apart.register_parameter("b", flat.slice(0, 10, 20));
  together.register_parameter("a", flat.slice(0, 0, 11).clone());
  together.register_parameter("b", together.named_parameters()["a"].detach().slice(0, 10));
  with_buffer.register_parameter("a", flat.clone());
  with_buffer.register_buffer("copy", with_buffer.named_parameters()["a"].detach());
  FullyShardOptions options;
  options.initial_weights = InitialWeights::kBroadcast;
  EXPECT_EQ(error_of([&] { fully_shard(apart, world_mesh(), options); }), "no error");
  EXPECT_THROWS_WITH(fully_shard(together, world_mesh(), options), "the parameter b shares memory with the parameter a");
  EXPECT_THROWS_WITH(fully_shard(with_buffer, world_mesh(), options), "the buffer copy shares memory with the parameter a");
}

TEST(BadInput, InferenceModeIsRefused) {
  torch::manual_seed(7);
  nn::Linear outside(kWidth, 3);
  {
    const c10::InferenceMode inference;
    EXPECT_THROWS_WITH(fully_shard(outside, world_mesh()), "fully_shard: called in InferenceMode");
    nn::Linear inside(kWidth, 3);
    const c10::InferenceMode normal(false);
    EXPECT_THROWS_WITH(fully_shard(inside, world_mesh()), "the parameter weight was made in InferenceMode");
  }
  EXPECT_EQ(error_of([&] { fully_shard(outside, world_mesh()); }), "no error");
}

TEST(BadInput, WhatIsReadBeforeMaterializeIsNamed) {
  if (world_size() == 1) return; // nothing is gathered
  auto linear = on_meta([] { return nn::Linear(kWidth, 3); });
  const auto handle = fully_shard(linear, world_mesh());
  EXPECT_THROWS_WITH(FSDPModule(handle).unshard(), "(weight, …) are on the meta device: call tessera::materialize");
  EXPECT_THROWS_WITH(linear(own_input()), "the parameter weight is on the meta device: call tessera::materialize");
  EXPECT_THROWS_WITH(materialize(*linear, nullptr), "tessera::materialize: init is an empty function");
}

/// As in an unsharded model: what autograd saved of a parameter is out of date.
TEST(BadInput, AStepBetweenForwardAndBackwardIsAnError) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<NestedLayers>(strategy);
    torch::optim::AdamW optimizer(model->parameters());
    model->loss(model->input_of(0, 0)).backward();
    const auto loss = model->loss(model->input_of(1, 0));
    optimizer.step();
    EXPECT_THROWS_WITH(loss.backward(), "has been modified by an inplace operation");
    optimizer.zero_grad();
    model->loss(model->input_of(1, 0)).backward();
    EXPECT_TRUE(is_dtensor(model->head->weight.grad()));
  }
}

TEST(BadInput, BatchesOfOtherSizesOnEachRankTrain) {
  for (const auto& strategy : equivalence_strategies()) {
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
    linear(batch_of(world_rank()).to(test_device())).sum().backward();
    for (int64_t rank = 0; rank < world_size(); ++rank) (plain(batch_of(rank)).sum() / world_size()).backward();
    EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), plain->weight.grad());
  }
}

} // namespace
} // namespace tessera::testing::bad_input_test
