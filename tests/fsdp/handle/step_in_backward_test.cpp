// What a backward reads after an optimizer has stepped it there: an error, and never a gradient of other values.
#include <gmock/gmock.h>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/optim/fused.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::step_in_backward_test {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kWidth = 6;
constexpr auto kWritten = "modified by an inplace operation";

/// Layers, of which the last one's weight is read by another name as well.
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    torch::manual_seed(3);
    for (int64_t i = 0; i < 5; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
  }
  Tensor run(Tensor x) {
    for (auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  const Tensor& last_weight() { return layers[layers->size() - 1]->as<torch::nn::Linear>()->weight; }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Layers);

/// Runs the last layer of the model without a graph, and again in backward: activation checkpointing of a program's own.
struct CheckpointOfLast : torch::autograd::Function<CheckpointOfLast> {
  static Tensor compute(const Tensor& x, LayersImpl* model) { return torch::tanh(x.matmul(model->last_weight())); }
  static Tensor forward(AutogradContext* context, const Tensor& x, LayersImpl* model) {
    context->save_for_backward({x});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    return compute(x, model);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode grad_mode(true);
    torch::autograd::backward({compute(x, reinterpret_cast<LayersImpl*>(context->saved_data["model"].toInt()))}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

struct Maker {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)> make;
};

/// LibTorch's SGD writes `data()`, AdamW the parameter, and the fused ones below autograd.
std::vector<Maker> makers() {
  using torch::optim::SGDOptions;
  return {{"SGD", [](const auto& all) { return std::make_unique<torch::optim::SGD>(all, SGDOptions(0.1)); }},
          {"AdamW", [](const auto& all) { return std::make_unique<torch::optim::AdamW>(all); }},
          {"FusedSGD", [](const auto& all) { return std::make_unique<FusedSGD>(all, SGDOptions(0.1)); }},
          {"FusedAdamW", [](const auto& all) { return std::make_unique<FusedAdamW>(all); }}};
}

using Shard = std::function<void(torch::nn::Module&)>; ///< nothing for a plain model

Shard shard_by(const Strategy& strategy) {
  return [strategy, mesh = strategy.mesh()](torch::nn::Module& module) {
    if (strategy.replicates) {
      replicate(module, mesh, strategy.options);
    } else {
      fully_shard(module, mesh, strategy.options);
    }
  };
}

Layers make_layers(const Shard& shard) {
  Layers model;
  model->to(test_device());
  if (!shard) return model;
  for (auto& layer : *model->layers) shard(*layer);
  shard(*model);
  return model;
}

Tensor own_input() {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(5 + world_rank()));
  return torch::randn({4, kWidth}, generator).to(test_device());
}

using Train = std::function<void(Layers&)>; ///< forwards and backwards

/// A model that trains with steps in backward, beside one that steps after it: the first may end in the error `refusal`, where
/// the step comes too early, and otherwise has the numbers of the second. Whether it ended so.
bool is_refused_or_equal(const Maker& maker, const Shard& shard, const std::string& refusal, const Train& train) {
  auto model = make_layers(shard), after = make_layers(shard);
  const auto in_backward = maker.make(model->parameters()), own = maker.make(after->parameters());
  const auto stepping = step_in_backward(*model, *in_backward);
  try {
    train(model);
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr(refusal));
    return true;
  }
  train(after);
  own->step();
  const auto expected = after->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(torch::equal(full(item.value()), full(expected[item.key()]))) << item.key();
  return false;
}

/// In a backward that reads the last layer once more, after all others. Groups are reduced in the order of what forward read
/// first, so that this may come before the step; with one rank there is nothing to wait for.
void expect_never_other_values(const std::string& refusal, const Shard& shard, const Train& train) {
  for (const auto& maker : makers()) {
    SCOPED_TRACE(maker.name);
    const bool is_refused = is_refused_or_equal(maker, shard, refusal, train);
    if (!shard || world_size() == 1) EXPECT_TRUE(is_refused);
  }
}

TEST(StepInBackward, RefusesAFormulaThatReadsWhatIsStepped) {
  const auto train = [](Layers& model) {
    const auto x = own_input().requires_grad_();
    model->run(x.matmul(model->last_weight().detach())).sum().backward();
  };
  expect_never_other_values(kWritten, {}, train);
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    expect_never_other_values(kWritten, shard_by(strategy), train);
  }
}

TEST(StepInBackward, RefusesAFunctionThatReadsWhatIsStepped) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    expect_never_other_values(
        "step_in_backward: layers.4.weight was stepped when its gradient had come, and then ", shard_by(strategy),
        [](Layers& model) { model->run(CheckpointOfLast::apply(own_input().requires_grad_(), model.get())).sum().backward(); });
  }
}

TEST(StepInBackward, RefusesTheGraphOfAForwardBeforeTheStep) {
  const auto look = [](const Shard& shard) {
    for (const auto& maker : makers()) {
      SCOPED_TRACE(maker.name);
      auto model = make_layers(shard);
      const auto optimizer = maker.make(model->parameters());
      const auto stepping = step_in_backward(*model, *optimizer);
      const auto first = model->run(own_input()).sum(), second = model->run(own_input()).square().sum();
      first.backward();
      EXPECT_THROWS_WITH(second.backward(), kWritten);
    }
  };
  look({});
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    look(shard_by(strategy));
  }
}

TEST(StepInBackward, StepsAfterTheSecondRunThatReadsAParameter) {
  const std::vector<Train> trains = {[](Layers& model) {
                                       const auto run = [&](const Tensor& x) {
                                         return torch::tanh(x.matmul(model->last_weight()));
                                       };
                                       model->run(recompute(run, own_input().requires_grad_())).sum().backward();
                                     },
                                     [](Layers& model) {
                                       const auto x = model->layers[0]->as<torch::nn::Linear>()->forward(own_input());
                                       CheckpointOfLast::apply(x, model.get()).sum().backward();
                                     }};
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    for (const auto& train : trains) EXPECT_FALSE(is_refused_or_equal(makers().back(), shard_by(strategy), "", train));
  }
}

} // namespace
} // namespace tessera::testing::step_in_backward_test
