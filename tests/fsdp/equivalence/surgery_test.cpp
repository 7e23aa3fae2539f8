// Initialization, copies and conversions of sharded modules: they stay sharded, or say what to do instead.
#include <gtest/gtest.h>

#include <sstream>

#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::surgery_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Varied : CaseModel {
  Varied()
      : a(register_module("a", nn::Linear(kWidth, 8))),
        conv(register_module("conv", nn::Conv1d(nn::Conv1dOptions(2, 4, 3).padding(1)))),
        embedding(register_module("embedding", nn::Embedding(nn::EmbeddingOptions(5, 8).padding_idx(1)))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})))),
        gru(register_module("gru", nn::GRU(8, 3))) {}
  Tensor loss(const Tensor& x) override {
    const auto h = norm(a(x) + embedding(torch::arange(4, x.device())));
    return std::get<0>(gru(conv(h.view({2, 2, 8})))).square().mean();
  }
  nn::Linear a;
  nn::Conv1d conv;
  nn::Embedding embedding;
  nn::LayerNorm norm;
  nn::GRU gru;
};

using Init = std::pair<std::string, std::function<void(Tensor)>>;

std::vector<Init> initializers() {
  namespace init = nn::init;
  return {{"constant_", [](Tensor t) { init::constant_(t, 0.25); }},
          {"dirac_", [](Tensor t) { init::dirac_(t); }},
          {"eye_", [](Tensor t) { init::eye_(t); }},
          {"kaiming_normal_", [](Tensor t) { init::kaiming_normal_(t); }},
          {"kaiming_uniform_", [](Tensor t) { init::kaiming_uniform_(t, 1.5); }},
          {"normal_", [](Tensor t) { init::normal_(t, 1, 2); }},
          {"ones_", [](Tensor t) { init::ones_(t); }},
          {"orthogonal_", [](Tensor t) { init::orthogonal_(t, 1.5); }},
          {"sparse_", [](Tensor t) { init::sparse_(t, 0.3); }},
          {"uniform_", [](Tensor t) { init::uniform_(t, -1, 2); }},
          {"xavier_normal_", [](Tensor t) { init::xavier_normal_(t); }},
          {"xavier_uniform_", [](Tensor t) { init::xavier_uniform_(t, 2); }},
          {"zeros_", [](Tensor t) { init::zeros_(t); }}};
}

TEST(Surgery, EveryInitializerDrawsWhatTheUnshardedModelDraws) {
  for (const auto& strategy : equivalence_strategies()) {
    const auto plain = make_twin<Varied>();
    const auto model = sharded_case<Varied>(strategy);
    for (const auto& [name, initialize] : initializers()) {
      SCOPED_TRACE(strategy.name + " " + name);
      const bool is_conv = name == "dirac_";
      torch::manual_seed(11);
      initialize(is_conv ? plain->conv->weight : plain->a->weight);
      torch::manual_seed(11);
      initialize(is_conv ? model->conv->weight : model->a->weight);
      EXPECT_EQ(parameter_difference(*model, *plain), 0);
      EXPECT_NEAR(model->loss(model->input_of(0, 0)).item<double>(), plain->loss(plain->input_of(0, 0)).item<double>(), 1e-5);
    }
  }
}

TEST(Surgery, ResetParametersDrawsWhatTheUnshardedModelDraws) {
  const auto reset = [](Varied& layers) {
    torch::manual_seed(12);
    layers.a->reset_parameters();
    layers.conv->reset_parameters();
    layers.embedding->reset_parameters();
    layers.norm->reset_parameters();
    layers.gru->reset_parameters();
  };
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto plain = make_twin<Varied>();
    const auto model = sharded_case<Varied>(strategy);
    reset(*plain);
    reset(*model);
    EXPECT_EQ(parameter_difference(*model, *plain), 0);
  }
}

TEST(Surgery, WritesThroughViewsReachTheShard) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto plain = make_twin<Varied>();
    const auto model = sharded_case<Varied>(strategy);
    const auto write = [](Varied& layers) {
      const torch::NoGradGuard no_grad;
      layers.embedding->weight[3].fill_(0.5);
      layers.a->weight.t()[1].mul_(2);
      layers.a->weight.slice(0, 2, 5).zero_();
      layers.a->weight.data().add_(0.125);
      layers.norm->weight.copy_(torch::arange(8));
    };
    write(*plain);
    write(*model);
    EXPECT_EQ(parameter_difference(*model, *plain), 0);
    EXPECT_NEAR(model->loss(model->input_of(0, 0)).item<double>(), plain->loss(plain->input_of(0, 0)).item<double>(), 1e-5);
  }
}

TEST(Surgery, ZeroGradAndRequiresGradActOnTheParameter) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Varied>(strategy);
    model->loss(model->input_of(0, 0)).backward();
    model->zero_grad(/*set_to_none=*/false);
    for (const auto& parameter : model->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(full(parameter.grad()).abs().sum().item<double>(), 0);
    }
    model->zero_grad();
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    for (auto& parameter : model->a->parameters()) parameter.requires_grad_(false);
    model->loss(model->input_of(0, 0)).backward();
    EXPECT_FALSE(model->a->weight.grad().defined());
    EXPECT_TRUE(model->conv->weight.grad().defined());
  }
}

TEST(Surgery, ConversionsAreErrorsThatNameTheParameter) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Varied>(strategy);
    const std::string message = "would unshard it (Module::to does this): choose dtype and device before fully_shard";
    EXPECT_THROWS_WITH(model->to(torch::kDouble), message);
    EXPECT_THROWS_WITH(model->to(torch::kBFloat16), "set_data on the sharded parameter a.weight " + message);
    EXPECT_THROWS_WITH(model->norm->weight.set_data(torch::ones({8})), "norm.weight " + message);
    model->to(test_device()); // changes nothing
    model->loss(model->input_of(0, 0)).backward();
    EXPECT_TRUE(is_dtensor(model->a->weight));
  }
}

// As recurrent modules do in Module::to, to lay their weights out anew.
TEST(Surgery, CudnnMayNotHaveAShardedWeightWhichIsNotGatheredToSaySo) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Varied>(strategy);
    process_context().reset_counters();
    for (const auto& weight : model->gru->parameters()) EXPECT_FALSE(at::cudnn_is_acceptable(weight));
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 0);
  }
}

TEST(Surgery, ADetachedCopyOutlivesTheModel) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto model = sharded_case<Varied>(strategy);
    const auto weight = model->a->weight.detach();
    const auto expected = full(weight);
    model.reset();
    EXPECT_TENSORS_EQUAL(full(weight.t() * 2), expected.t() * 2);
    const torch::NoGradGuard no_grad;
    EXPECT_TENSORS_EQUAL(full(weight.t().sum(0)), expected.to(twin_device()).t().sum(0).cpu());
  }
}

TEST(Surgery, AWriteThroughAViewKeepsTheOtherValuesOfACastGroup) {
  for (auto strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    strategy.options.mixed_precision.param_dtype = torch::kBFloat16;
    const auto plain = make_twin<Varied>(), model = sharded_case<Varied>(strategy);
    const torch::NoGradGuard no_grad;
    plain->embedding->weight[3].fill_(0.5);
    model->embedding->weight[3].fill_(0.5);
    EXPECT_EQ(parameter_difference(*model, *plain), 0);
  }
}

struct CloneableImpl : nn::Cloneable<CloneableImpl> {
  CloneableImpl() { CloneableImpl::reset(); }
  void reset() override {
    inner = register_module("inner", nn::Linear(kWidth, 3));
    scale = register_parameter("scale", torch::ones({3}));
  }
  Tensor forward(const Tensor& x) { return inner(x) * scale; }
  nn::Linear inner{nullptr};
  Tensor scale;
};
TORCH_MODULE(Cloneable);

TEST(Surgery, ACloneIsAnErrorThatSaysWhatToDo) {
  torch::manual_seed(3);
  Cloneable module;
  fully_shard(module, world_mesh());
  EXPECT_THROWS_WITH(module->clone(), "call clone() before fully_shard");
  module->forward(input_of(0, 0).to(test_device())).sum().backward();
  EXPECT_TRUE(module->scale.grad().defined());
}

TEST(Surgery, TorchSaveAndLoadNameTheCheckpointFunctions) {
  torch::manual_seed(3);
  Cloneable module;
  fully_shard(module, world_mesh());
  std::stringstream stream;
  EXPECT_THROWS_WITH(torch::save(module, stream), "tessera::checkpoint::save");
  EXPECT_THROWS_WITH(torch::save(module->scale, stream), "tessera::checkpoint::save");
  std::stringstream saved;
  torch::save(Cloneable(), saved);
  EXPECT_THROWS_WITH(torch::load(module, saved), "tessera::checkpoint::load");
}

TEST(Surgery, PrintingShowsTheModuleAndTheDTensor) {
  const auto model = sharded_case<Varied>(equivalence_strategies()[0]);
  std::ostringstream text;
  text << *model->a;
  EXPECT_EQ(text.str(), "torch::nn::Linear(in_features=6, out_features=8, bias=true)");
  EXPECT_NE(to_string(model->a->weight).find("RaggedShard"), std::string::npos) << to_string(model->a->weight);
}

TEST(Surgery, RawPointersOfAShardedParameterAreRefused) {
  const auto model = sharded_case<Varied>(equivalence_strategies()[0]);
  EXPECT_THROWS_WITH(model->a->weight.data_ptr<float>(), "has no storage");
  EXPECT_THROWS_WITH(model->a->weight.const_data_ptr<float>(), "has no storage");
  const torch::NoGradGuard no_grad;
  EXPECT_TENSORS_EQUAL(unsharded(model->a->weight).clone(), full(model->a->weight));
  EXPECT_TRUE(unsharded(torch::ones({2})).equal(torch::ones({2})));
}

} // namespace
} // namespace tessera::testing::surgery_test
