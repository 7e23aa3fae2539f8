// Hooks of users on sharded parameters, and partial differentiation.
#include <gtest/gtest.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/fsdp/equivalence/layers.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::hooks_test {
namespace {

using torch::Tensor;

/// Scales b's gradients by hooks, registered in the first iteration.
struct ScalesGradients : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    if (step == 0) {
      b->weight.register_hook([](const Tensor& gradient) { return gradient * 0.5; });
      b->weight.register_hook([](const Tensor& gradient) { return gradient + gradient; });
      b->bias.register_hook([](const Tensor& gradient) { return gradient * -0.1; });
    }
    return Layers::iterate(step, ranks);
  }
};

class Hooks : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Hooks, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Equivalence, Hooks,
                         ::testing::ValuesIn(with_all_strategies({equivalence_case<ScalesGradients>("tensor_hooks")})),
                         param_name);

TEST(Hooks, FireOnceABackwardWithTheReducedGradient) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const bool before : {true, false}) {
      SCOPED_TRACE(strategy.name + (before ? ", registered before sharding" : ", registered after"));
      auto plain = make_case<Layers>(), model = make_case<Layers>();
      for (int64_t rank = 0; rank < world_size(); ++rank) (plain->loss(input_of(0, rank)) / world_size()).backward();
      std::vector<Tensor> seen;
      const auto watch = [&] { model->b->weight.register_hook([&](const Tensor& gradient) { seen.push_back(gradient); }); };
      if (before) watch();
      shard_case(*model, strategy);
      if (!before) watch();
      for (size_t backward = 1; backward <= 2; ++backward) {
        model->zero_grad();
        model->loss(model->input_of(0, world_rank())).backward();
        ASSERT_EQ(seen.size(), backward);
        ASSERT_TRUE(is_dtensor(seen.back()));
        EXPECT_TENSORS_CLOSE(full(seen.back()), plain->b->weight.grad());
      }
    }
  }
}

/// An optimizer step a parameter, as soon as its gradient is there.
struct StepInBackward : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& parameter) override {
    const torch::NoGradGuard no_grad;
    parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = Tensor();
    ++calls;
  }
  int calls = 0;
};

TEST(Hooks, PostAccumulateHooksStepInBackward) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>();
    const auto model = sharded_case<Layers>(strategy);
    std::vector<StepInBackward*> hooks;
    for (const auto& parameter : model->parameters()) {
      auto hook = std::make_unique<StepInBackward>();
      hooks.push_back(hook.get());
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
    }
    for (int64_t step = 0; step < 3; ++step) {
      plain->zero_grad();
      for (int64_t rank = 0; rank < world_size(); ++rank) (plain->loss(input_of(step, rank)) / world_size()).backward();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : plain->parameters()) parameter.sub_(parameter.grad(), 0.1);
      const torch::AutoGradMode grad_mode(true);
      model->loss(model->input_of(step, world_rank())).backward();
    }
    for (const auto* hook : hooks) EXPECT_EQ(hook->calls, 3);
    EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
  }
}

/// Those of b's weight run in autograd's node for a gradient, and those of a's at the end of the backward.
TEST(Hooks, MayTrainAnotherModel) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const bool in_bf16 : {false, true}) {
      for (const char* name : {"b.weight", "a.weight"}) {
        SCOPED_TRACE(strategy.name + (in_bf16 ? ", in bf16, " : ", ") + name);
        auto own = strategy;
        if (in_bf16) own.options.mixed_precision.param_dtype = torch::kBFloat16;
        const auto model = sharded_case<Layers>(own), other = sharded_case<Layers>(own), twin = sharded_case<Layers>(own);
        const auto train = [](Layers& layers) {
          const torch::AutoGradMode grad_mode(true);
          torch::optim::SGD optimizer(layers.parameters(), 0.1);
          layers.loss(layers.input_of(0, world_rank())).backward();
          for (const auto& item : layers.named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
          optimizer.step();
          optimizer.zero_grad();
        };
        train(*twin);
        model->named_parameters()[name].register_hook([&](const Tensor&) { train(*other); });
        model->loss(model->input_of(1, world_rank())).backward();
        EXPECT_GT(parameter_difference(*other, *make_case<Layers>()), 0);
        const auto expected = twin->named_parameters();
        for (const auto& item : other->named_parameters())
          EXPECT_TENSORS_EQUAL(full(item.value()), full(expected[item.key()])) << item.key();
      }
    }
  }
}

TEST(Hooks, AHookMustKeepThePlacement) {
  const auto model = sharded_case<Layers>(equivalence_strategies()[0]);
  model->b->weight.register_hook([](const Tensor& gradient) { return torch::zeros(gradient.sizes(), gradient.device()); });
  EXPECT_THROWS_WITH(model->loss(model->input_of(0, 0)).backward(),
                     "a hook on the sharded parameter b.weight returned a gradient that is not sharded as the parameter is");
}

TEST(Hooks, GradOverAParameterIsAnError) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Layers>(strategy);
    EXPECT_THROWS_WITH(torch::autograd::grad({model->loss(model->input_of(0, 0))}, {model->b->weight}),
                       "torch::autograd::grad over the sharded parameter b.weight");
    model->loss(model->input_of(0, 0)).backward();
    EXPECT_TRUE(model->b->weight.grad().defined());
  }
}

TEST(Hooks, GradOverInputsAndActivationsWorks) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>();
    const auto model = sharded_case<Layers>(strategy);
    const auto gradients = [](Layers& layers) {
      const auto x = layers.input_of(0, 0).requires_grad_();
      const auto h = layers.a(x);
      return torch::autograd::grad({layers.head(layers.b(h)).square().mean()}, {x, h});
    };
    const auto got = gradients(*model), expected = gradients(*plain);
    EXPECT_TENSORS_CLOSE(got[0], expected[0]);
    EXPECT_TENSORS_CLOSE(got[1], expected[1]);
    EXPECT_FALSE(model->a->weight.grad().defined());
  }
}

TEST(Hooks, BackwardWithInputsReducesOnlyThose) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>();
    const auto model = sharded_case<Layers>(strategy);
    for (int64_t rank = 0; rank < world_size(); ++rank)
      (plain->loss(input_of(0, rank)) / world_size())
          .backward({}, false, false, std::vector<Tensor>{plain->b->weight, plain->a->bias});
    model->loss(model->input_of(0, world_rank()))
        .backward({}, false, false, std::vector<Tensor>{model->b->weight, model->a->bias});
    for (const auto& item : model->named_parameters()) {
      const auto expected = plain->named_parameters()[item.key()].grad();
      ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key();
      if (expected.defined()) {
        EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected);
      }
    }
  }
}

/// Sharded, where the parameter is.
Tensor half_of(const Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  return parameter.detach().clone().mul_(0.5);
}

/// ‖p − p₀‖² with a sharded copy p₀: an op among DTensors, in grad mode.
TEST(Hooks, ProximalTermOverShardedCopiesTrains) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>();
    const auto model = sharded_case<Layers>(strategy);
    const auto run = [](Layers& layers, const std::vector<int64_t>& ranks) {
      const auto anchor = half_of(layers.b->weight);
      for (const int64_t rank : ranks) (layers.loss(layers.input_of(0, rank)) / static_cast<double>(ranks.size())).backward();
      (layers.b->weight - anchor).square().sum().backward();
    };
    std::vector<int64_t> everyone;
    for (int64_t rank = 0; rank < world_size(); ++rank) everyone.push_back(rank);
    run(*plain, everyone);
    run(*model, {world_rank()});
    EXPECT_TENSORS_CLOSE(full(model->b->weight.grad()), plain->b->weight.grad());
  }
}

/// In one backward with a loss of activations, computed before it or after.
TEST(Hooks, SeeOneGradientOfAParameterThatIsAlsoReadAsADTensor) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const bool penalty_first : {false, true}) {
      SCOPED_TRACE(strategy.name + (penalty_first ? ", penalty first" : ", loss first"));
      auto plain = make_case<Layers>();
      const auto model = sharded_case<Layers>(strategy);
      const auto run = [&](Layers& layers) {
        int calls = 0;
        const auto anchor = half_of(layers.b->weight);
        layers.b->weight.register_hook([&calls](const Tensor& gradient) {
          ++calls;
          return gradient.clamp(-1e-2, 1e-2);
        });
        const auto penalty = [&] { return (layers.b->weight - anchor).square().sum(); };
        const auto loss = [&] { return layers.loss(layers.input_of(0, 0)); };
        const auto first = penalty_first ? penalty() : loss(), second = penalty_first ? loss() : penalty();
        (first + second).backward();
        return calls;
      };
      EXPECT_EQ(run(*plain), 1);
      EXPECT_EQ(run(*model), 1);
      EXPECT_TENSORS_CLOSE(full(model->b->weight.grad()), plain->b->weight.grad());
      EXPECT_TENSORS_CLOSE(full(model->a->weight.grad()), plain->a->weight.grad());
    }
  }
}

/// A product with a weight that gets no gradient from it.
struct Gate : torch::autograd::Function<Gate> {
  static Tensor forward(torch::autograd::AutogradContext* /*context*/, const Tensor& x, const Tensor& weight) {
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*gradients*/) {
    return {Tensor(), Tensor()};
  }
};

/// After a gradient of the head.
void fail_in_backward(Layers& layers) {
  const torch::AutoGradMode grad_mode(true);
  const auto input = torch::ones({4, 5}, layers.device()).requires_grad_() * 1;
  input.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("thrown in backward"); });
  EXPECT_THROWS_WITH(layers.head(input).sum().backward(), "thrown in backward");
}

/// Only what a parameter gets as a DTensor lands, perhaps around a backward of the model that fails.
TEST(Hooks, AParameterThatIsAlsoReadByAFunctionWithoutItsGradientTrains) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const bool fails_within : {false, true}) {
      SCOPED_TRACE(strategy.name + (fails_within ? ", with a failure in a hook" : ""));
      auto plain = make_case<Layers>();
      const auto model = sharded_case<Layers>(strategy);
      for (auto* layers : {plain.get(), model.get()}) {
        const auto anchor = half_of(layers->b->weight);
        const auto gated = Gate::apply(torch::ones({4, 8}, layers->device()), layers->b->weight).sum();
        if (fails_within) gated.register_hook([layers](const Tensor&) { fail_in_backward(*layers); });
        (gated + (layers->b->weight - anchor).square().sum()).backward();
      }
      EXPECT_TENSORS_CLOSE(full(model->b->weight.grad()), plain->b->weight.grad());
      for (auto* layers : {plain.get(), model.get()}) layers->loss(layers->input_of(0, 0)).backward();
      EXPECT_TENSORS_CLOSE(full(model->b->weight.grad()), plain->b->weight.grad());
      EXPECT_TENSORS_CLOSE(full(model->a->weight.grad()), plain->a->weight.grad());
    }
  }
}

} // namespace
} // namespace tessera::testing::hooks_test
