// Megatron's tensor and sequence parallelism on the unmodified GPT of the examples.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/clip_grad.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/matchers.h>

#include <functional>
#include <memory>

namespace tessera::testing::gpt_test {
namespace {

using torch::Tensor;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}
std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

struct Case {
  bool sequence = false, clips = false, strict = true;
  int64_t batch = 2, time = 12;
  torch::Dtype dtype = torch::kFloat;
};

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

torch::Tensor loss_of(gpt::Gpt& model, const Tokens& tokens) {
  return torch::cross_entropy_loss(model->forward(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
}

/// Six steps beside one process: losses, norms and, in double, parameters. (In float Adam makes steps of a key's bias, whose
/// gradient is rounding alone.)
void compare(const Case& each, const MakeOptimizer& make_optimizer) {
  const bool is_double = each.dtype == torch::kDouble;
  const double bound = is_double ? 1e-11 : 1e-5;
  auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  twin->to(each.dtype);
  model->to(each.dtype);
  parallelize(*model, tensor_mesh(), gpt_plan(each.sequence));
  const auto reference = make_optimizer(twin->parameters()), optimizer = make_optimizer(model->parameters());
  const auto strict = each.strict ? std::make_unique<StrictSharding>() : nullptr;
  for (int64_t step = 0; step < 6; ++step) {
    const auto tokens = draw_tokens(step, each.batch, each.time);
    const auto expected = loss_of(twin, tokens), loss = loss_of(model, tokens);
    ASSERT_NEAR(loss.item<double>(), expected.item<double>(), bound) << "step " << step;
    reference->zero_grad();
    optimizer->zero_grad();
    expected.backward();
    loss.backward();
    if (each.clips) {
      const auto norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
      ASSERT_NEAR(norm, torch::nn::utils::clip_grad_norm_(twin->parameters(), 0.5), bound) << "step " << step;
    }
    reference->step();
    optimizer->step();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters()) {
    if (is_double) EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), 1e-9, 1e-11) << item.key();
  }
}

TEST(ParallelGpt, TrainsAsOneProcess) {
  for (const bool sequence : {false, true}) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(c10::str(sequence ? "sequence parallel, " : "tensor parallel, ", dtype));
      compare({.sequence = sequence, .dtype = dtype}, adamw);
      compare({.sequence = sequence, .clips = true, .dtype = dtype}, sgd);
    }
  }
}

TEST(ParallelGpt, TrainsOnOddSizes) {
  for (const bool sequence : {false, true}) {
    compare({.sequence = sequence, .clips = true, .batch = 1, .time = 13, .dtype = torch::kDouble}, sgd);
    // A rank has nothing of a sequence of one: norms are whole there.
    compare({.sequence = sequence, .clips = true, .strict = false, .batch = 3, .time = 1, .dtype = torch::kDouble}, sgd);
  }
}

struct Counts {
  int64_t all_reduces, all_gathers, reduce_scatters;
  bool operator==(const Counts&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Counts& counts) {
    return out << counts.all_reduces << " all-reduces, " << counts.all_gathers << " all-gathers, " << counts.reduce_scatters
               << " reduce-scatters";
  }
};
Counts counts_of(const CountCollectives& counter) {
  return {counter.count(CollectiveKind::kAllReduce).calls, counter.count(CollectiveKind::kAllGather).calls,
          counter.count(CollectiveKind::kReduceScatter).calls};
}

struct StepCounts {
  Counts forward, loss, backward, optimizer;
};
StepCounts count_step(int64_t layers, bool sequence) {
  auto model = seeded_gpt(small_gpt(layers));
  parallelize(*model, tensor_mesh(), gpt_plan(sequence));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto tokens = draw_tokens(0, 2, 12);
  StepCounts counts;
  for (int step = 0; step < 2; ++step) { // the second one has its communicators
    const CountCollectives forward;
    const auto logits = model->forward(tokens.inputs);
    counts.forward = counts_of(forward);
    const CountCollectives in_loss;
    const auto loss = gpt::cross_entropy(logits, tokens.targets);
    counts.loss = counts_of(in_loss);
    const CountCollectives backward;
    loss.backward();
    counts.backward = counts_of(backward);
    const CountCollectives in_step;
    optimizer.step();
    counts.optimizer = counts_of(in_step);
  }
  return counts;
}

TEST(ParallelGpt, SendsWhatMegatronSends) {
  if (world_size() == 1) GTEST_SKIP() << "one rank sends nothing";
  for (const int64_t layers : {1, 2, 4}) {
    const auto counts = count_step(layers, /*sequence=*/false);
    EXPECT_EQ(counts.forward, (Counts{2 * layers + 1, 0, 0}));
    EXPECT_EQ(counts.loss, (Counts{3, 0, 0}));
    EXPECT_EQ(counts.backward, (Counts{2 * layers + 1, 0, 0}));
    EXPECT_EQ(counts.optimizer, (Counts{0, 0, 0}));
  }
}

/// Each collective of a layer is of one activation, b·s·h elements.
TEST(ParallelGpt, SendsActivationsAlone) {
  if (world_size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const int64_t layers = 2, activation = int64_t{2} * 12 * 48 * 4, calls = 2 * layers + 1;
  const auto tokens = draw_tokens(0, 2, 12);
  for (const bool sequence : {false, true}) {
    auto model = seeded_gpt(small_gpt(layers));
    parallelize(*model, tensor_mesh(), gpt_plan(sequence));
    const CountCollectives forward;
    const auto logits = model->forward(tokens.inputs);
    if (sequence) {
      EXPECT_EQ(forward.count(CollectiveKind::kAllGather).bytes, calls * activation);
      EXPECT_EQ(forward.count(CollectiveKind::kReduceScatter).bytes, calls * activation);
    } else {
      EXPECT_EQ(forward.count(CollectiveKind::kAllReduce).bytes, calls * activation);
    }
    const auto loss = loss_of(model, tokens);
    const CountCollectives backward;
    loss.backward();
    if (!sequence) EXPECT_EQ(backward.count(CollectiveKind::kAllReduce).bytes, calls * activation);
  }
}

TEST(ParallelGpt, GathersAndScattersTheSequence) {
  if (world_size() == 1) GTEST_SKIP() << "one rank sends nothing";
  for (const int64_t layers : {1, 2}) {
    const auto counts = count_step(layers, /*sequence=*/true);
    EXPECT_EQ(counts.forward, (Counts{0, 2 * layers + 1, 2 * layers + 1}));
    // The all-reduce is for the gradients of all norms, row-wise biases and the positions. The inputs of layers are gathered
    // again for the gradients of the weights.
    EXPECT_EQ(counts.backward, (Counts{1, 2 * (2 * layers + 1), 2 * layers + 1}));
    EXPECT_EQ(counts.optimizer, (Counts{0, 0, 0}));
  }
}

/// Gradients that are summed at the end of a backward are right for whoever looks: after several backwards, in hooks, of
/// `autograd::grad`, of some parameters alone.
TEST(ParallelGpt, GradientsAreWholeForWhoeverLooks) {
  const auto mesh = tensor_mesh();
  const auto twice = [](gpt::Gpt& model) {
    for (const int64_t step : {0, 1}) loss_of(model, draw_tokens(step, 2, 8)).backward();
  };
  const auto by_grad = [](gpt::Gpt& model) {
    const auto parameters = model->parameters();
    const auto gradients = torch::autograd::grad({loss_of(model, draw_tokens(0, 2, 8))}, parameters);
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
  };
  const auto of_some = [](gpt::Gpt& model) {
    auto parameters = model->parameters();
    parameters.resize(parameters.size() / 2);
    loss_of(model, draw_tokens(0, 2, 8)).backward({}, std::nullopt, false, parameters);
  };
  const auto with_hooks = [](gpt::Gpt& model) {
    for (auto& parameter : model->parameters()) parameter.register_hook([](const Tensor& gradient) { return gradient.abs(); });
    loss_of(model, draw_tokens(0, 2, 8)).backward();
  };
  for (const auto& run : std::vector<std::function<void(gpt::Gpt&)>>{twice, by_grad, of_some, with_hooks}) {
    auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
    twin->to(torch::kDouble);
    model->to(torch::kDouble);
    parallelize(*model, mesh, gpt_plan(/*sequence=*/true));
    run(twin);
    run(model);
    const auto expected = twin->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto &gradient = item.value().grad(), &wanted = expected[item.key()].grad();
      ASSERT_EQ(gradient.defined(), wanted.defined()) << item.key();
      if (!wanted.defined()) continue;
      EXPECT_EQ(DTensor(gradient).placements(), DTensor(item.value()).placements()) << item.key();
      EXPECT_TENSORS_CLOSE(whole_of(gradient), wanted, 1e-10, 1e-12) << item.key();
    }
  }
}

/// What a backward left that failed does not reach the next one's gradients.
TEST(ParallelGpt, AFailedBackwardLeavesNothing) {
  auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true));
  bool fails = true;
  model->named_parameters()["position_embedding.weight"].register_hook([&](const Tensor& gradient) {
    TORCH_CHECK(!fails, "on purpose");
    return gradient;
  });
  const auto tokens = draw_tokens(0, 2, 8);
  EXPECT_THROWS_WITH(loss_of(model, tokens).backward(), "on purpose");
  fails = false;
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
  loss_of(model, tokens).backward();
  loss_of(twin, tokens).backward();
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6) << item.key();
}

TEST(ParallelGpt, EvaluatesAsOneProcess) {
  const torch::NoGradGuard no_grad;
  for (const bool sequence : {false, true}) {
    auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
    parallelize(*model, tensor_mesh(), gpt_plan(sequence));
    const auto tokens = draw_tokens(0, 2, 11).inputs;
    const CountCollectives counter;
    const auto logits = model->forward(tokens);
    if (world_size() > 1) EXPECT_EQ(counts_of(counter), (sequence ? Counts{0, 5, 5} : Counts{5, 0, 0}));
    EXPECT_TENSORS_CLOSE(whole_of(logits), twin->forward(tokens), 1e-5);
  }
}

TEST(ParallelGpt, EvaluatesInInferenceMode) {
  for (const bool sequence : {false, true}) {
    auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
    parallelize(*model, tensor_mesh(), gpt_plan(sequence));
    const auto tokens = draw_tokens(0, 2, 11).inputs;
    {
      const c10::InferenceMode inference_mode;
      const auto whole = DTensor(model->forward(tokens)).full_tensor();
      EXPECT_TENSORS_CLOSE(whole, twin->forward(tokens), 1e-5);
    }
    const torch::NoGradGuard no_grad; // with what inference left in caches
    EXPECT_TENSORS_CLOSE(whole_of(model->forward(tokens)), twin->forward(tokens), 1e-5);
  }
}

TEST(ParallelGpt, RecomputesAsOneProcess) {
  for (const bool sequence : {false, true}) {
    auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
    parallelize(*model, tensor_mesh(), gpt_plan(sequence));
    model->set_recompute(true);
    const auto tokens = draw_tokens(0, 2, 12);
    gpt::cross_entropy(twin->forward(tokens.inputs), tokens.targets).backward();
    gpt::cross_entropy(model->forward(tokens.inputs), tokens.targets).backward();
    const auto expected = twin->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(DTensor(item.value().grad()).placements(), DTensor(item.value()).placements()) << item.key();
      EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-6);
    }
  }
}

/// A penalty on whole weights, which are plain, beside a loss on the mesh.
TEST(ParallelGpt, AddsWholeWeightsToItsLoss) {
  auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"tp"});
  parallelize(*model, mesh, gpt_plan(/*sequence=*/true));
  const auto tokens = draw_tokens(0, 4, 8);
  const auto loss_of = [&](gpt::Gpt& net) {
    auto loss = torch::cross_entropy_loss(net->forward(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
    for (const auto& item : net->named_parameters()) {
      const auto weight = is_dtensor(item.value()) ? DTensor(item.value()).full_tensor() : item.value();
      loss = loss + 0.01 * weight.square().sum();
    }
    return loss;
  };
  loss_of(twin).backward();
  loss_of(model).backward();
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6) << item.key();
}

} // namespace
} // namespace tessera::testing::gpt_test
