// Groups that are chosen: numbers as without sharding, and memory beside groups that are made by hand.
#include <gtest/gtest.h>

#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/tensor/plan_lines.h>
#include <tessera/plan/auto_shard.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/plan/test_models.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::auto_shard_test {
namespace {

using torch::nn::Linear, torch::nn::Module, torch::nn::Sequential;
using ModulePtr = std::shared_ptr<Module>;

/// A model, the groups that somebody who knows it would make besides the root's, and its loss.
struct Example {
  std::string name;
  std::function<ModulePtr()> make;
  std::vector<std::vector<std::string>> by_hand; ///< of several, the best counts
  std::function<torch::Tensor(Module&)> loss;
};

Example of(const PlannedModel& model, std::vector<std::vector<std::string>> by_hand) {
  const auto loss = [model](Module& module) {
    const PassSettings pass{.rows = 2};
    return model.loss(module, model.batch(pass, torch::kCPU), pass);
  };
  return {model.name, model.build, std::move(by_hand), loss};
}

struct ResidualImpl : Module {
  ResidualImpl(int64_t from, int64_t to) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).padding(1)));
    norm = register_module("norm", torch::nn::GroupNorm(4, to));
    if (from != to) shortcut = register_module("shortcut", torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 1)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return (shortcut ? shortcut(x) : x) + torch::relu(norm(conv(x))); }
  torch::nn::Conv2d conv{nullptr}, shortcut{nullptr};
  torch::nn::GroupNorm norm{nullptr};
};
TORCH_MODULE(Residual);

struct ResidualNetworkImpl : Module {
  ResidualNetworkImpl()
      : stem(register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)))),
        narrow(register_module("narrow", torch::nn::ModuleList(Residual(16, 16), Residual(16, 16)))),
        wide(register_module("wide", torch::nn::ModuleList(Residual(16, 32), Residual(32, 32)))),
        head(register_module("head", Linear(32 * 16, 10))) {}
  torch::Tensor forward(const torch::Tensor& images) {
    auto x = stem(images);
    for (const auto& list : {narrow, wide}) {
      for (const auto& block : *list) x = block->as<ResidualImpl>()->forward(x);
    }
    return head(x.flatten(1));
  }
  torch::nn::Conv2d stem;
  torch::nn::ModuleList narrow, wide;
  Linear head;
};
TORCH_MODULE(ResidualNetwork);

Example residual_network() {
  return {"residual network",
          [] { return ResidualNetwork().ptr(); },
          {{"narrow.*", "wide.*"}, {"narrow", "wide"}, {"narrow.*", "wide.*", "head"}},
          [](Module& module) {
            return module.as<ResidualNetworkImpl>()->forward(torch::ones({2, 3, 4, 4})).square().mean();
          }};
}

/// A member for each block, no list.
struct MembersImpl : Module {
  MembersImpl() {
    for (const auto* name : {"first", "second", "third"}) register_module(name, planned::Block(16, 2));
    register_module("head", Linear(16, 5));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& child : children()) {
      auto* const block = child->as<planned::BlockImpl>();
      x = block ? block->forward(x) : child->as<torch::nn::LinearImpl>()->forward(x);
    }
    return x;
  }
};
TORCH_MODULE(Members);

Example members() {
  return {"members",
          [] { return Members().ptr(); },
          {{"first", "second", "third"}},
          [](Module& module) {
            return module.as<MembersImpl>()->forward(torch::ones({2, 6, 16})).square().mean();
          }};
}

/// One layer that is called twice, and under two names.
struct SharedImpl : Module {
  SharedImpl() : layer(register_module("layer", Linear(24, 24))), head(register_module("head", Linear(24, 24))) {
    register_module("again", layer);
    scale = register_parameter("scale", torch::ones({24}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(layer(torch::tanh(layer(x))))) * scale; }
  Linear layer, head;
  torch::Tensor scale;
};
TORCH_MODULE(Shared);

Example shared() {
  return {"shared",
          [] { return Shared().ptr(); },
          {{"layer", "head"}},
          [](Module& module) {
            return module.as<SharedImpl>()->forward(torch::ones({2, 24})).square().mean();
          }};
}

Example encoder() {
  const auto make = [] {
    torch::nn::TransformerEncoder encoder(
        torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(0), 3));
    return encoder.ptr();
  };
  return {"LibTorch's encoder", make, {{"layers.*"}}, [](Module& module) {
            return module.as<torch::nn::TransformerEncoderImpl>()->forward(torch::ones({5, 2, 16})).square().mean();
          }};
}

Example recurrent() {
  const auto make = [] { return torch::nn::GRU(torch::nn::GRUOptions(8, 12).num_layers(2)).ptr(); };
  return {"recurrent", make, {{}}, [](Module& module) {
            return std::get<0>(module.as<torch::nn::GRUImpl>()->forward(torch::ones({4, 2, 8}))).square().mean();
          }};
}

std::vector<Example> examples() {
  std::vector<std::string> linears;
  for (int i = 0; i < 10; i += 2) linears.push_back(std::to_string(i));
  const auto models = planned::models();
  const auto single = planned::transformer("one block", 61, 32, 1, /*is_tied=*/false, /*length=*/8);
  return {of(models[0], {{"blocks.*"}, {"blocks.*", "embed"}}),
          of(models[1], {{"blocks.*"}, {"blocks.*", "embed", "lm_head"}}),
          of(models[2], {linears}),
          of(models[3], {linears}),
          of(models[4], {linears}),
          of(models[5], {{"0", "3", "6", "9", "13"}}),
          of(single, {{"blocks.*"}, {"blocks.*", "embed", "lm_head"}}),
          residual_network(),
          members(),
          shared(),
          encoder(),
          recurrent()};
}

void shard_by_hand(Module& module, const std::vector<std::string>& patterns) {
  for (const auto& item : module.named_modules()) {
    for (const auto& pattern : patterns) {
      if (internal::parallel::matches(pattern, item.key()) && !is_sharded(*item.value()))
        fully_shard(*item.value(), world_mesh());
    }
  }
  fully_shard(module, world_mesh());
}

void step(const Example& example, Module& module, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  example.loss(module).backward();
  clip_grad_norm_(module, 0.5);
  optimizer.step();
}

TEST(AutoShard, TrainsAsWithoutSharding) {
  for (const auto& example : examples()) {
    SCOPED_TRACE(example.name);
    torch::manual_seed(3);
    const auto sharded = example.make();
    torch::manual_seed(3);
    const auto plain = example.make();
    auto_shard(*sharded, world_mesh());
    torch::optim::SGD own(sharded->parameters(), 0.1), twin(plain->parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      step(example, *sharded, own);
      twin.zero_grad();
      example.loss(*plain).backward();
      torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
      twin.step();
    }
    EXPECT_LE(parameter_difference(*sharded, *plain), 1e-5);
  }
}

int64_t peak_of(const Example& example, const std::function<void(Module&)>& shard) {
  torch::manual_seed(3);
  const auto module = example.make();
  shard(*module);
  torch::optim::SGD optimizer(module->parameters(), 0.1);
  step(example, *module, optimizer);
  step(example, *module, optimizer);
  optimizer.zero_grad();
  return explain(*module, {.optimizer_tensors = 0}).memory.peak;
}

TEST(AutoShard, NeedsLittleMoreThanGroupsByHand) {
  if (world_size() == 1) GTEST_SKIP() << "of what ranks gather";
  for (const auto& example : examples()) {
    SCOPED_TRACE(example.name);
    int64_t best = std::numeric_limits<int64_t>::max();
    for (const auto& groups : example.by_hand)
      best = std::min(best, peak_of(example, [&](Module& module) { shard_by_hand(module, groups); }));
    const auto chosen = peak_of(example, [](Module& module) { auto_shard(module, world_mesh()); });
    EXPECT_LE(static_cast<double>(chosen), 1.1 * static_cast<double>(best));
  }
}

TEST(AutoGroups, AreBlocksAndLargeModules) {
  using Groups = std::vector<std::vector<std::string>>;
  const planned::Transformer model(1003, 32, 2, /*is_tied=*/false);
  EXPECT_EQ(auto_groups(*model), (Groups{{"embed"}, {"blocks.0"}, {"blocks.1"}, {"lm_head"}})) << "the last norm is the root's";
  const planned::Transformer tied(1003, 32, 2, /*is_tied=*/true);
  EXPECT_EQ(auto_groups(*tied), (Groups{{"embed"}, {"blocks.0"}, {"blocks.1"}}));
  const auto halves = auto_groups(*model, {.budget = int64_t{20} << 10});
  EXPECT_GT(halves.size(), 4U) << "a block has more bytes than that, and is split";
  const auto small = planned::perceptron({8, 8, 8, 64, 64});
  EXPECT_EQ(auto_groups(*small), (Groups{{"6"}})) << "the first three are not worth a message";
  EXPECT_EQ(auto_groups(*model, {.shard = {.strategy = tessera::Strategy::kNoShard}}), Groups{});
}

TEST(AutoShard, RefusesANegativeBudget) {
  const planned::Transformer model(61, 16, 1, /*is_tied=*/false);
  EXPECT_THROWS_WITH(auto_groups(*model, {.budget = -1}), "budget is -1 bytes");
}

} // namespace
} // namespace tessera::testing::auto_shard_test
