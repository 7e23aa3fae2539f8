// Models that compute with their weights before these meet an activation, in evaluation: without grad mode such an op gives a
// DTensor, and what the model makes of it in the end is what the unsharded model makes.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::evaluation_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kFeatures = 6;

/// The parameters that the forwards below choose from.
struct WeightsImpl : nn::Module {
  WeightsImpl() {
    base = register_module("base", nn::Linear(kFeatures, kFeatures));
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(2, 2, 3)));
    a = register_parameter("a", torch::randn({2, kFeatures}));
    b = register_parameter("b", torch::randn({kFeatures, 2}));
    gain = register_parameter("gain", torch::randn({kFeatures}));
    scalar = register_parameter("scalar", torch::tensor(0.5));
    table = register_parameter("table", torch::randn({5, kFeatures}));
    scale = register_buffer("scale", torch::tensor(0.25));
    mask = register_buffer("mask", torch::randn({kFeatures, kFeatures}) > 0);
  }
  Tensor forward(const Tensor& x) { return run(*this, x); }
  std::function<Tensor(WeightsImpl&, const Tensor&)> run;
  nn::Linear base{nullptr};
  nn::Conv1d conv{nullptr};
  Tensor a, b, gain, scalar, table, scale, mask;
};
TORCH_MODULE(Weights);

/// In whose forward grad mode is off while the model trains, too.
struct Cubes : torch::autograd::Function<Cubes> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight.pow(3);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1].pow(3), (gradients[0] * saved[0] * 3 * saved[1].pow(2)).sum(0)};
  }
};

struct Forward {
  std::string name;
  std::function<Tensor(WeightsImpl&, const Tensor& x)> run; ///< x is [4, kFeatures]
};

std::vector<Forward> forwards() {
  using W = WeightsImpl&;
  using T = const Tensor&;
  return {
      {"elementwise", [](W w, T x) { return x * (1 + w.gain); }},
      {"lora", [](W w, T x) { return torch::linear(x, w.base->weight + w.b.mm(w.a), w.base->bias) * (1 + w.gain); }},
      {"lora without bias", [](W w, T x) { return x.mm((w.base->weight + w.b.mm(w.a)).t()); }},
      {"lora, transposed", [](W w, T x) { return x.mm(w.base->weight.t() + w.a.t().mm(w.b.t())); }},
      {"weight norm",
       [](W w, T x) {
         const auto direction = w.base->weight / w.base->weight.norm(2, {1}, /*keepdim=*/true);
         return torch::linear(x, w.gain.unsqueeze(1) * direction, w.base->bias);
       }},
      {"spectral norm",
       [](W w, T x) { return torch::linear(x, w.base->weight / std::get<1>(torch::linalg_svd(w.base->weight)).max()); }},
      {"weight standardization",
       [](W w, T x) {
         const auto k = w.conv->weight;
         const auto standard = (k - k.mean({1, 2}, true)) / (k.std(c10::IntArrayRef{1, 2}, true, true) + 1e-5);
         return torch::conv1d(x.view({2, 2, kFeatures}), standard, w.conv->bias);
       }},
      {"hypernetwork",
       [](W w, T x) {
         const auto made = torch::tanh(w.base(w.table)).mean(0) + w.gain.square();
         return x * made.view({1, kFeatures}).expand({4, kFeatures});
       }},
      {"merged qkv",
       [](W w, T x) {
         return torch::linear(x, torch::cat({w.base->weight * 2, w.a.exp(), w.table}));
       }},
      {"list beside activations",
       [](W w, T x) {
         return torch::cat({x, w.table.square(), w.a}).sum(0) * x;
       }},
      {"embedding of a product", [](W w, T x) { return torch::embedding(w.table * w.gain, torch::arange(4, x.device())) + x; }},
      {"index by parameters",
       [](W w, T x) {
         return x.index({torch::indexing::Slice(), (w.gain - 1).argsort()});
       }},
      {"mask from parameters", [](W w, T x) { return x.masked_fill(w.gain.abs() < 0.5, 0) + torch::where(w.gain > 0, x, -x); }},
      {"a choice by values", [](W w, T x) { return (w.gain.square() >= 0).all().item<bool>() ? x * w.gain : x; }},
      {"0-dim activation", [](W w, T x) { return (w.gain * x.mean()).sum() + x; }},
      {"0-dim activation beside what is computed", [](W w, T x) { return (w.gain.exp() * x.std()).sum() + x; }},
      {"0-dim buffer", [](W w, T x) { return torch::linear(x, (w.base->weight / w.scale).round() * w.scale); }},
      {"0-dim parameter", [](W w, T x) { return x * (w.scalar * 2).sigmoid() + w.scalar.exp(); }},
      {"plain buffer", [](W w, T x) { return torch::linear(x, w.base->weight.exp().masked_fill(w.mask, 0)); }},
      {"in place, of the activation", [](W w, T x) { return (x * 1).add_(1 + w.gain).mul_(w.gain.exp()); }},
      {"in place, of the weight",
       [](W w, T x) { return torch::linear(x, w.base->weight.clone().clamp_(-1, 1).div_(w.gain.norm())); }},
      {"beside its like",
       [](W w, T x) {
         const auto weight = w.base->weight * 2;
         return torch::linear(x, torch::where(weight > 0, weight, torch::zeros_like(weight)));
       }},
      {"what autograd takes apart",
       [](W w, T x) {
         const auto classes = torch::arange(4, x.device());
         const auto loss = torch::cross_entropy_loss(x * w.gain.exp(), classes);
         return loss + torch::cosine_similarity(x, (1 + w.gain).unsqueeze(0)) + torch::cross_entropy_loss(x, classes);
       }},
      {"a number first", [](W w, T x) { return x * (1 - w.gain) + 2 / w.gain.exp() + x.mm(1 - w.base->weight) % 3; }},
      {"beside a constant of its shape",
       [](W w, T x) {
         auto sum = torch::zeros_like(w.gain);
         sum += w.gain;
         return x * sum * (torch::ones_like(w.gain) - w.gain) + torch::full_like(w.gain, 2);
       }},
      {"beside noise of its shape",
       [](W w, T x) {
         torch::manual_seed(5);
         return torch::linear(x, w.base->weight + w.gain.exp() * torch::randn_like(w.base->weight));
       }},
      {"a Function", [](W w, T x) { return Cubes::apply(x, w.gain); }},
      {"parameters alone", [](W w, T) { return w.gain.square().sum() + w.a.mean(); }},
      {"regularized", [](W w, T x) { return w.base(x).square().mean() + 0.1 * w.base->weight.square().sum(); }},
  };
}

/// `run` beside `x` under every way to evaluate, and in training.
struct Mode {
  std::string name;
  std::function<Tensor(Weights&, const Tensor& x)> run;
};

std::vector<Mode> modes() {
  const auto plainly = [](Weights& model, const Tensor& x) { return model->forward(x); };
  const auto within = [=](auto guard) {
    return [=](Weights& model, const Tensor& x) {
      const typename decltype(guard)::type scope;
      return plainly(model, x);
    };
  };
  return {{"training", [=](Weights& model, const Tensor& x) { return plainly(model, x).detach(); }},
          {"no grad", within(std::type_identity<torch::NoGradGuard>())},
          {"inference", within(std::type_identity<c10::InferenceMode>())},
          {"no grad in a scope",
           [=](Weights& model, const Tensor& x) {
             const torch::NoGradGuard no_grad;
             const auto scope = forward_scope(*model);
             return plainly(model, x);
           }},
          {"no grad in a call", [](Weights& model, const Tensor& x) {
             const torch::NoGradGuard no_grad;
             return call(model, x);
           }}};
}

Weights make_weights() {
  torch::manual_seed(3);
  Weights model;
  model->to(twin_device());
  return model;
}

Weights sharded_weights(const Strategy& strategy) {
  auto model = make_weights();
  strategy.replicates ? replicate(*model, strategy.mesh(), strategy.options)
                      : fully_shard(model, strategy.mesh(), strategy.options);
  return model;
}

/// Another one on each rank.
Tensor input_of_rank(c10::Device device = test_device()) {
  torch::manual_seed(static_cast<uint64_t>(world_rank()));
  return torch::randn({4, kFeatures}).to(device);
}

/// For a model from make_weights().
Tensor input_of_twin() { return input_of_rank(twin_device()); }

TEST(Evaluation, ComputesWithWeightsAsUnsharded) {
  for (const auto& strategy : strategies()) {
    auto plain = make_weights(), model = sharded_weights(strategy);
    const auto x = input_of_rank();
    for (const auto& forward : forwards()) {
      plain->run = model->run = forward.run;
      const auto expected = plain->forward(input_of_twin()).detach();
      for (const auto& mode : modes()) {
        SCOPED_TRACE(strategy.name + ": " + forward.name + ", " + mode.name);
        const auto got = mode.run(model, x);
        // What nothing but parameters went into is handed out as a DTensor, which `call` makes whole.
        EXPECT_EQ(is_dtensor(got), forward.name == "parameters alone" && mode.name != "training" && !mode.name.ends_with("call"));
        EXPECT_TENSORS_CLOSE(full(got), expected, 1e-4, 1e-5);
      }
    }
  }
}

TEST(Evaluation, TakesWhatIsComputedInTheDtypeOfThePolicy) {
  for (auto strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    strategy.options.mixed_precision.param_dtype = torch::kBFloat16;
    auto model = sharded_weights(strategy);
    model->run = [](WeightsImpl& w, const Tensor& x) { return x.mm((w.base->weight + w.b.mm(w.a)).t()) * w.gain.exp(); };
    const auto x = input_of_rank();
    const auto expected = call(model, x).detach();
    const torch::NoGradGuard no_grad;
    const auto got = call(model, x);
    EXPECT_EQ(expected.scalar_type(), torch::kBFloat16);
    EXPECT_TENSORS_CLOSE(got, expected, 0.1, 0.1);
  }
}

TEST(Evaluation, AReshapeInPlaceKeepsWhatIsComputedFromParameters) {
  auto plain = make_weights(), model = sharded_weights({"per-parameter", world_mesh, {.layout = BufferLayout::kPerParameter}});
  const torch::NoGradGuard no_grad;
  const auto run = [&](WeightsImpl& w, const Tensor& x) {
    return x * (w.gain * 2).unsqueeze_(0) + w.gain.exp().unsqueeze_(0).add_(x[0]);
  };
  EXPECT_TENSORS_CLOSE(run(*model, input_of_rank()), run(*plain, input_of_twin()), 1e-5, 1e-6);
}

/// Weights merged once, and then used where gradients of the input are wanted.
TEST(Evaluation, MergedWeightsServeLaterForwards) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto gradient = [](WeightsImpl& w, Tensor x) {
      Tensor merged;
      {
        const torch::NoGradGuard no_grad;
        merged = w.base->weight + w.b.mm(w.a);
      }
      x.requires_grad_();
      (torch::linear(x, merged).square().sum() + x.mm(merged.t()).sum()).backward();
      return x.grad();
    };
    auto plain = make_weights(), model = sharded_weights(strategy);
    EXPECT_TENSORS_CLOSE(gradient(*model, input_of_rank()), gradient(*plain, input_of_twin()), 1e-4, 1e-4);
  }
}

/// A plain tensor written into what was computed makes the whole of that plain, in the caller's hands.
TEST(Evaluation, WritesOfActivationsIntoComputedWeights) {
  for (const auto& strategy : strategies()) {
    for (const bool inference : {false, true}) {
      SCOPED_TRACE(strategy.name + (inference ? ", inference" : ", no grad"));
      auto plain = make_weights(), model = sharded_weights(strategy);
      const torch::NoGradGuard no_grad;
      std::optional<c10::InferenceMode> mode;
      if (inference) mode.emplace();
      const auto write = [&](WeightsImpl& w, const Tensor& x) {
        auto weight = w.base->weight.exp();
        weight.mul_(x[0]).masked_fill_(w.mask, 0);
        auto rows = w.table * 2;
        rows.index_put_({torch::tensor({1}, x.device())}, x[1]);
        auto copied = w.table.clone();
        copied.copy_(x[2]);
        return torch::linear(x, torch::cat({weight, rows, copied}));
      };
      const auto x = input_of_rank();
      EXPECT_TENSORS_CLOSE(write(*model, x), write(*plain, input_of_twin()), 1e-4, 1e-5);
      const auto message = error_of([&] {
        const auto weight = model->table * 2;
        weight[1].copy_(x[1]); // the view alone would become plain
      });
      EXPECT_NE(message.find("which was computed from the parameter table without grad mode and shares its memory"),
                std::string::npos)
          << message;
      const auto viewed = model->gain * 2;
      const auto element = viewed[0]; // which one rank has, in the memory of its part
      EXPECT_THROWS_WITH(viewed.copy_(x[0]), "shares its memory with another tensor");
    }
  }
}

/// How a model of blocks runs its forward.
enum class Run { kPlainly, kRecomputed, kInScope };

/// What a forward from the resharded state leaves: the unsharded bytes of each group, and those that are kept for the next one.
std::vector<int64_t> left_by_forward(Net& net, Run run) {
  const auto states = fsdp(*net).state()->subtree();
  for (const auto& state : states) FSDPModule(state).reshard();
  const bool recomputes = run == Run::kRecomputed && torch::GradMode::is_enabled();
  std::optional<ForwardScope> scope;
  if (run == Run::kInScope) scope.emplace(*net);
  const auto tokens = own_batch(0);
  auto x = net->embedded(tokens);
  for (const auto& each : *net->blocks) {
    auto& block = *each->as<Block>();
    x = recomputes ? recompute(block, x) : block.forward(x);
  }
  x = torch::matmul(net->norm(x), net->embed->weight.t());
  scope.reset();
  std::vector<int64_t> bytes;
  for (const auto& state : states) bytes.push_back(FSDPModule(state).unsharded_bytes());
  bytes.push_back(fsdp(*net).state()->group()->cache().cached_bytes());
  return bytes;
}

/// As a training's forward does, in a step like any other. What Python's FSDP2 leaves open is in python_parity_test.cpp.
TEST(Evaluation, LeavesTheGroupsAndTheMemoryOfATrainingForward) {
  for (const auto& strategy : strategies()) {
    auto net = make_net();
    shard_model(net, strategy);
    for (int64_t step = 0; step < 2; ++step) loss_of(net, global_batch(step)).backward();
    for (const auto run : {Run::kPlainly, Run::kRecomputed, Run::kInScope}) {
      SCOPED_TRACE(strategy.name + ", run " + std::to_string(static_cast<int>(run)));
      const auto expected = left_by_forward(net, run);
      {
        const torch::NoGradGuard no_grad;
        EXPECT_EQ(left_by_forward(net, run), expected);
      }
      const c10::InferenceMode inference;
      EXPECT_EQ(left_by_forward(net, run), expected);
      EXPECT_EQ(left_by_forward(net, run), expected) << "again";
    }
  }
}

/// In a chain of forwards without a backward.
TEST(Evaluation, KeepsAndFreesGroupsAsItIsToldBetweenForwards) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const torch::NoGradGuard no_grad;
  const auto open_after_a_forward = [&] {
    net->forward(own_batch(0));
    int64_t open = 0;
    for (const auto& block : *net->blocks) open += fsdp(*block).unsharded_bytes() > 0 ? 1 : 0;
    return open;
  };
  EXPECT_EQ(open_after_a_forward(), 1);
  fsdp(*net).set_reshard_after_forward(false);
  EXPECT_EQ(open_after_a_forward(), 3);
  EXPECT_EQ(open_after_a_forward(), 3);
  fsdp(*net).set_reshard_after_forward(true);
  EXPECT_LE(open_after_a_forward(), 1);
}

TEST(Evaluation, StrategiesThatKeepParametersWholeAreNotToldToFreeThem) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  for (const auto strategy : {tessera::Strategy::kZero1, tessera::Strategy::kZero2}) {
    Net net = make_net();
    shard_model(net, {"", world_mesh, {.strategy = strategy}});
    fsdp(*net).set_reshard_after_forward(false);
    fsdp(*net).set_reshard_after_forward(true);
    const torch::NoGradGuard no_grad;
    net->forward(own_batch(0));
    for (const auto& block : *net->blocks) EXPECT_GT(fsdp(*block).unsharded_bytes(), 0);
  }
}

/// What trains a model goes on seeing DTensors.
TEST(Evaluation, OptimizersAveragesAndClippingStayOnShards) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_weights(), model = sharded_weights(strategy);
    const auto train = [](Weights& weights) {
      weights->run = [](WeightsImpl& w, const Tensor& x) { return w.base(x) * w.gain; };
      torch::optim::AdamW optimizer(weights->parameters(), torch::optim::AdamWOptions(0.1));
      std::vector<Tensor> averages;
      {
        const torch::NoGradGuard no_grad;
        for (const auto& parameter : weights->parameters()) averages.push_back(parameter.clone());
      }
      for (int64_t step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        weights->forward(torch::ones({2, kFeatures}, weights->gain.device())).square().mean().backward();
        const torch::NoGradGuard no_grad;
        torch::nn::utils::clip_grad_norm_(weights->parameters(), 1.0);
        optimizer.step();
        const auto parameters = weights->parameters();
        for (size_t i = 0; i < parameters.size(); ++i) averages[i].mul_(0.9).add_(parameters[i] * 0.1);
      }
      return averages;
    };
    const auto expected = train(plain), got = train(model);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_dtensor(got[i]));
      EXPECT_TENSORS_CLOSE(full(got[i]), expected[i], 1e-4, 1e-5);
    }
    EXPECT_LE(parameter_difference(*model, *plain), 1e-4);
  }
}

/// Beside what was computed, as in `1 + weight`: the result is a DTensor, for which nothing was gathered.
TEST(Evaluation, NumbersAreNoPlainTensors) {
  using W = WeightsImpl&;
  const std::vector<Forward> with_numbers{
      {"where, other", [](W w, const Tensor&) { return torch::where(w.gain > 0, w.gain, 1.5); }},
      {"where, self", [](W w, const Tensor&) { return torch::where(w.gain > 0, 2, w.gain.exp()); }},
      {"where, both", [](W w, const Tensor&) { return torch::where(w.gain > 0, 1.5, 0); }},
      {"where, of integers", [](W w, const Tensor&) { return torch::where(w.gain > 0, w.gain.argsort(), 7); }},
      {"pow", [](W w, const Tensor&) { return torch::pow(2, w.gain); }},
      {"float_power", [](W w, const Tensor&) { return torch::float_power(2, w.gain.exp()); }},
      {"xlogy", [](W w, const Tensor&) { return torch::xlogy(2, w.gain.abs()); }},
      {"remainder", [](W w, const Tensor&) { return torch::remainder(2, w.gain); }},
      {"copysign", [](W w, const Tensor&) { return torch::copysign(w.gain, -1); }},
      {"isin", [](W w, const Tensor&) { return torch::isin(w.gain, 0.5); }},
      {"index_fill", [](W w, const Tensor&) { return (w.gain * 2).masked_fill(w.gain > 0, 3); }},
      {"rsub", [](W w, const Tensor&) { return 1 - w.gain; }},
      {"clamp", [](W w, const Tensor&) { return w.gain.clip(-0.1, 0.1); }},
      {"threshold", [](W w, const Tensor&) { return torch::threshold(w.gain, 0.1, 20); }},
      {"nan_to_num", [](W w, const Tensor&) { return torch::nan_to_num(w.gain.log(), 4.0); }},
  };
  for (const auto& strategy : strategies()) {
    auto plain = make_weights(), model = sharded_weights(strategy);
    for (const auto& forward : with_numbers) {
      for (const bool inference : {false, true}) {
        SCOPED_TRACE(strategy.name + ": " + forward.name + (inference ? ", inference" : ", no grad"));
        const torch::NoGradGuard no_grad;
        std::optional<c10::InferenceMode> mode;
        if (inference) mode.emplace();
        const auto got = forward.run(*model, {}), expected = forward.run(*plain, {});
        EXPECT_TRUE(is_dtensor(got));
        EXPECT_EQ(got.scalar_type(), expected.scalar_type());
        EXPECT_TENSORS_CLOSE(full(got), expected, 1e-5, 1e-6);
      }
    }
  }
}

/// What other values were written into is as those are, also where a view of it was written.
TEST(Evaluation, WritesOfOtherDTensorsIntoComputedWeights) {
  auto model = sharded_weights({"per-parameter", world_mesh, {.layout = BufferLayout::kPerParameter}});
  model->run = [](WeightsImpl& w, const Tensor& x) { return w.base(x); };
  const auto x = input_of_rank();
  model->forward(x).sum().backward();
  const torch::NoGradGuard no_grad;
  const auto weight = model->base->weight;
  const auto& gradient = weight.grad();
  const std::vector<std::function<void(Tensor&)>> others{
      [&](Tensor& computed) { computed.copy_(gradient); },
      [&](Tensor& computed) { computed.add_(gradient); },
      [&](Tensor& computed) { computed.unsqueeze(-1).copy_(gradient.unsqueeze(-1)); },
      [&](Tensor& computed) { computed.select(1, 0).add_(gradient.select(1, 1)); },
      [&](Tensor& computed) { computed.unsqueeze_(0).add_(gradient).squeeze_(0); },
      [&](Tensor& computed) { torch::add_out(computed, weight, gradient); },
      [&](Tensor& computed) { at::_foreach_add_(std::vector<Tensor>{computed}, std::vector<Tensor>{gradient}); },
  };
  for (const auto& write : others) {
    auto computed = weight.clone();
    const auto view = computed.unsqueeze(-1);
    write(computed);
    EXPECT_THROWS_WITH(x.mm(computed), "cannot be mixed with DTensors");
    EXPECT_THROWS_WITH(x.mm(view.squeeze(-1)), "cannot be mixed with DTensors");
  }
  auto computed = weight.clone();
  computed.select(1, 0).zero_();
  computed.unsqueeze(-1).mul_(2).add_((weight * 1).unsqueeze(-1));
  const auto whole = full(weight), expected = whole * 3;
  expected.select(1, 0).copy_(whole.select(1, 0));
  EXPECT_TENSORS_CLOSE(x.mm(computed), x.cpu().mm(expected), 1e-5, 1e-5);
}

/// Other DTensors beside plain tensors are the error that they were.
TEST(Evaluation, OnlyWhatComesFromParametersAloneIsMadeWhole) {
  auto model = sharded_weights({"full"});
  model->run = [](WeightsImpl& w, const Tensor& x) { return w.base(x); };
  const auto x = input_of_rank();
  model->forward(x).sum().backward();
  const torch::NoGradGuard no_grad;
  const std::vector<std::function<Tensor()>> mixes{
      [&] { return x.mm(model->base->weight.grad()); }, [&] { return x.mm(model->base->weight + model->base->weight.grad()); },
      [&] { return x.mm(torch::ones_like(model->base->weight.grad())); },
      [&] { return x.mm(torch::zeros_like(model->base->weight).add_(model->base->weight.grad())); },
      [&] {
        return x.mm(distribute_tensor(torch::ones({kFeatures, kFeatures}), world_mesh(), {Shard{0}}));
      }};
  for (const auto& mix : mixes) EXPECT_THROWS_WITH(mix(), "cannot be mixed with DTensors");
}

} // namespace
} // namespace tessera::testing::evaluation_test
