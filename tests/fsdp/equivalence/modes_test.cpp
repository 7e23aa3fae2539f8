// Modes: evaluation, autocast, several forwards or backwards, exceptions, recompute.
#include <gtest/gtest.h>

#include <tessera/fsdp/call.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/fsdp/equivalence/layers.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::modes_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

template <typename Guard>
struct EvaluatesBetweenSteps : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double evaluated = 0;
    eval();
    {
      const Guard guard;
      for (const int64_t rank : ranks)
        evaluated += loss(input_of(step + 100, rank)).template item<double>() / static_cast<double>(ranks.size());
    }
    train();
    return Layers::iterate(step, ranks) + evaluated;
  }
  Allowance allowance() const override { return {3, "the evaluation gathers each group once"}; }
};

struct Inference {
  c10::InferenceMode mode;
};

struct Autocast : Layers {
  /// In fp32, where devices differ in what autocast rounds.
  Tensor loss(const Tensor& x) override { return head(hidden(x)).to(torch::kFloat).square().mean(); }
  /// The mean over ranks is taken of the gradients: a scaled loss would round differently in bf16.
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    const auto count = static_cast<double>(ranks.size());
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto part = [&] {
        const AutocastScope scope(device().type());
        return watched(loss(input_of(step, rank)));
      }();
      part.backward();
      total += part.item<double>() / count;
    }
    if (count > 1) {
      for (const auto& parameter : parameters()) parameter.grad().div_(count);
    }
    return total;
  }
  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    return std::make_unique<torch::optim::SGD>(parameters(), torch::optim::SGDOptions(1e-2));
  }
};

struct SeveralForwards : Layers {
  Tensor loss(const Tensor& x) override { return Layers::loss(x) + Layers::loss(x * 2) + Layers::loss(x.flip(0) - 1); }
  Allowance allowance() const override {
    return {10, "each further forward gathers the three groups again, and so does its part of the backward"};
  }
};

struct SeveralBackwards : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto h = hidden(input_of(step, rank));
      const auto one = watched(head(h).square().mean() / static_cast<double>(ranks.size()));
      const auto two = watched(h.abs().mean() / static_cast<double>(ranks.size()));
      one.backward({}, /*retain_graph=*/true);
      two.backward({}, /*retain_graph=*/true);
      one.backward();
      total += (one + two).item<double>();
    }
    return total;
  }
  Allowance allowance() const override { return {5, "each further backward gathers the groups it goes through again"}; }
};

struct PartialBackward : Layers {
  Tensor loss(const Tensor& x) override {
    const auto h = hidden(x);
    return (head(h.detach()).square() + b(x.new_ones({4, 8}))).mean(); // nothing reaches a
  }
  Allowance allowance() const override { return {1, "b is read a second time in forward"}; }
};

struct ForwardWithoutBackward : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    for (const int64_t rank : ranks) watched(loss(input_of(step + 50, rank)));
    return Layers::iterate(step, ranks);
  }
  Allowance allowance() const override { return {3, "the first forward gathers each group once"}; }
};

/// Parameters written through `data()`, which autograd does not see (as SGD does), between a forward and its backward.
struct WritesBeforeBackward : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    Tensor sum;
    for (const int64_t rank : ranks) {
      const auto part = watched(loss(input_of(step, rank)) / static_cast<double>(ranks.size()));
      sum = sum.defined() ? sum + part : part;
    }
    for (const auto& parameter : parameters()) parameter.data().mul_(0.9);
    sum.backward();
    return sum.item<double>();
  }
  Allowance allowance() const override { return {2, "the groups that are open are gathered again"}; }
};

/// The gradient of the input, differentiated again.
struct GradientPenalty : Layers {
  Tensor loss(const Tensor& input) override {
    auto x = input.clone().requires_grad_();
    const auto y = Layers::loss(x);
    const auto gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return y + gradient.square().sum();
  }
  Allowance allowance() const override { return {5, "the second backward goes down the first one's graph and up the forward's"}; }
};

struct Failure : torch::autograd::Function<Failure> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
    throw std::runtime_error("thrown in backward");
  }
};

/// Throws in forward before group `where`, or in the backward in front of it, once an iteration; then trains on.
struct Throws : Layers {
  Throws(int64_t place, bool in_backward) : where(place), backward(in_backward) {}
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    EXPECT_THROWS_WITH(fail(input_of(step, 0)), backward ? "thrown in backward" : "thrown in forward");
    zero_grad();
    return Layers::iterate(step, ranks);
  }
  void fail(Tensor x) {
    const auto stumble = [&](int64_t place, const Tensor& value) {
      if (place != where) return value;
      TORCH_CHECK(backward, "thrown in forward");
      return Failure::apply(value);
    };
    x = stumble(0, x.clone().requires_grad_());
    x = stumble(1, a(x));
    x = stumble(2, b(x));
    watched(stumble(3, head(x)).sum()).backward();
  }
  Allowance allowance() const override { return {6, "the pass that fails gathers as well"}; }
  int64_t where;
  bool backward;
};

/// Recomputes `Layers::hidden` in backward (activation checkpointing).
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, Layers* model) {
    context->save_for_backward({x});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    return model->hidden(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    auto* model = reinterpret_cast<Layers*>(context->saved_data["model"].toInt());
    const torch::AutoGradMode grad_mode(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto y = model->hidden(x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

struct RecomputesActivations : Layers {
  RecomputesActivations() : first(register_module("first", nn::Linear(kWidth, kWidth))) {}
  Tensor loss(const Tensor& x) override { return head(Recompute::apply(first(x), this)).square().mean(); }
  nn::Linear first;
};

/// The forward boundaries of FSDP2, made explicit.
struct ExplicitBoundaries : Layers {
  Tensor loss(const Tensor& x) override {
    if (!is_sharded(*a)) return Layers::loss(x);
    return call(head, torch::gelu(call(b, call(a, x).tanh()))).square().mean();
  }
  Allowance allowance() const override { return {1, "the end of head's forward frees it, as FSDP2 does"}; }
};

std::vector<EquivalenceCase> all_modes() {
  std::vector<EquivalenceCase> cases{equivalence_case<EvaluatesBetweenSteps<torch::NoGradGuard>>("no_grad_evaluation"),
                                     equivalence_case<EvaluatesBetweenSteps<Inference>>("inference_mode_evaluation"),
                                     equivalence_case<SeveralForwards>("several_forwards_a_backward"),
                                     equivalence_case<SeveralBackwards>("several_backwards_a_forward"),
                                     equivalence_case<PartialBackward>("backward_through_a_part"),
                                     equivalence_case<ForwardWithoutBackward>("forward_without_backward"),
                                     equivalence_case<WritesBeforeBackward>("writes_before_backward"),
                                     equivalence_case<GradientPenalty>("double_backward_of_the_inputs_gradient"),
                                     equivalence_case<RecomputesActivations>("activation_recompute"),
                                     equivalence_case<ExplicitBoundaries>("call_and_forward_scope"),
                                     equivalence_case<Autocast>("autocast_bf16")};
  for (int64_t where = 0; where < 4; ++where) {
    for (const bool backward : {false, true}) {
      cases.push_back({std::string("exception_in_") + (backward ? "backward_" : "forward_") + std::to_string(where),
                       [=] { return std::make_shared<Throws>(where, backward); }});
    }
  }
  return cases;
}

class Modes : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Modes, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Equivalence, Modes, ::testing::ValuesIn(with_all_strategies(all_modes())), param_name);

TEST(Modes, CreateGraphOverAParameterIsAnError) {
  for (const auto& strategy : equivalence_strategies()) {
    const auto model = sharded_case<Layers>(strategy);
    EXPECT_THROWS_WITH(model->loss(model->input_of(0, 0)).backward({}, true, /*create_graph=*/true),
                       "backward(create_graph=true) reached the sharded parameter");
    model->zero_grad();
    model->loss(model->input_of(0, 0)).backward(); // and the next one works
    EXPECT_TRUE(model->a->weight.grad().defined());
  }
}

TEST(Modes, AutocastKeepsNoCopyOfAParameter) {
  const auto model = sharded_case<Layers>(equivalence_strategies()[0]);
  auto scope = std::make_optional<AutocastScope>();
  at::autocast::set_autocast_cache_enabled(true);
  const auto weight = c10::weak_intrusive_ptr<c10::TensorImpl>(model->a->weight.getIntrusivePtr());
  {
    const torch::NoGradGuard no_grad;
    model->loss(model->input_of(0, 0));
    model->loss(model->input_of(0, 0));
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  scope.reset();
  fsdp(*model).reshard();
  for (auto* layer : {&model->a, &model->b, &model->head}) fsdp(**layer).reshard();
  if (world_size() > 1) {
    EXPECT_EQ(fsdp(*model->a).unsharded_bytes(), 0);
  }
}

TEST(Modes, ForwardStepForwardReadsTheNewValues) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::manual_seed(7);
    Layers plain;
    const auto model = sharded_case<Layers>(strategy);
    torch::optim::SGD plain_optimizer(plain.parameters(), 0.1), optimizer(model->parameters(), 0.1);
    const auto x = input_of(0, 0), own = model->input_of(0, 0);
    for (int64_t step = 0; step < 3; ++step) {
      plain.loss(x).backward();
      plain_optimizer.step();
      model->loss(own).backward();
      model->loss(own); // unshards once more before the step
      optimizer.step();
      EXPECT_NEAR(model->loss(own).item<double>(), plain.loss(x).item<double>(), 1e-5);
    }
  }
}

} // namespace
} // namespace tessera::testing::modes_test
