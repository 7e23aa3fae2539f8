// What goes from stage to stage: trees, numbers, tensors without gradients; and what must not.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace tessera::testing::values_test {
namespace {

using Kind = PipelineScheduleKind;

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth, int64_t width = 5) {
    for (int64_t i = 0; i < depth; ++i)
      linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(width, width)));
  }
  std::vector<torch::nn::Linear> linears;
};
TORCH_MODULE(Stack);

Stack seeded_stack(int64_t depth) {
  torch::manual_seed(7);
  return Stack(depth);
}

using Layer = std::function<PipelineValue(StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue& batch)>;

PipelineLayers layers_of(Stack& stack, const Layer& layer) {
  PipelineLayers layers(*stack);
  auto* const impl = stack.get();
  for (size_t i = 0; i < stack->linears.size(); ++i) {
    layers.add(
        c10::str("layer", i), {c10::str("linear", i)},
        [impl, i, layer](const PipelineValue& input, const PipelineValue& batch) { return layer(*impl, i, input, batch); });
  }
  return layers;
}

PipelineLoss sum_of(const std::function<torch::Tensor(const PipelineValue&)>& result) {
  return {.sum = [result](const PipelineValue& output, const PipelineValue&) { return result(output).square().sum(); }};
}

DeviceMesh pipeline_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"pp"}); }

/// The loss and the gradients of a step beside one process.
void compare(
    int64_t depth, const Layer& layer, const std::function<torch::Tensor(const PipelineValue&)>& result,
    const std::function<void(Stack&)>& prepare = [](Stack&) {}) {
  const auto batches = [] {
    torch::manual_seed(11);
    std::vector<PipelineValue> all;
    for (int64_t i = 0; i < 3; ++i) all.emplace_back(torch::randn({i, 5})); // the first one has no rows
    return all;
  };
  auto twin = seeded_stack(depth);
  prepare(twin);
  double loss = 0;
  for (const auto& batch : batches()) {
    auto value = batch;
    for (size_t i = 0; i < twin->linears.size(); ++i) value = layer(*twin, i, value, batch);
    const auto one = result(value).square().sum() / 3;
    one.backward();
    loss += one.item<double>();
  }
  for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleH1}) {
    auto model = seeded_stack(depth);
    prepare(model);
    Pipeline pipeline(split(layers_of(model, layer), pipeline_mesh()), kind, sum_of(result));
    for (int step = 0; step < 2; ++step) { // with headers and without
      for (auto& each : pipeline.stages().parameters()) each.mutable_grad().reset();
      EXPECT_NEAR(pipeline.step(batches()).item<double>(), loss, 1e-5);
      const auto expected = twin->named_parameters();
      for (const auto& item : pipeline.stages().module->named_parameters()) {
        const auto& gradient = expected[item.key()].grad();
        ASSERT_EQ(item.value().grad().defined(), gradient.defined()) << item.key();
        if (gradient.defined()) EXPECT_TENSORS_CLOSE(item.value().grad(), gradient, 1e-5, 1e-6) << item.key();
      }
    }
  }
}

torch::Tensor linear(StackImpl& stack, size_t i, const torch::Tensor& x) { return stack.linears[i](x).tanh(); }

TEST(PipelineValues, AreTensors) {
  compare(
      5,
      [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
        return linear(stack, i, input.toTensor());
      },
      [](const PipelineValue& output) { return output.toTensor(); });
}

TEST(PipelineValues, MayBeWrittenInPlace) {
  compare(
      4,
      [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
        auto x = input.toTensor();
        if (i > 0) x.mul_(1.5);
        return stack.linears[i](x);
      },
      [](const PipelineValue& output) { return output.toTensor(); });
}

/// A residual, a mask, an int and a double that change with the micro-batch, a bool, a text, and a tensor without a gradient.
TEST(PipelineValues, AreTrees) {
  using Tree = std::tuple<torch::Tensor, std::vector<torch::Tensor>, int64_t, double, bool, std::string>;
  const auto layer = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue& batch) -> PipelineValue {
    const auto rows = batch.toTensor().size(0);
    if (i == 0) {
      const auto& x = batch.toTensor();
      return Tree{linear(stack, i, x),
                  {x, x.gt(0), torch::arange(rows), torch::ones({0, 2})},
                  rows,
                  0.5 * static_cast<double>(rows),
                  rows % 2 == 0,
                  "a text"};
    }
    auto [x, others, count, factor, is_even, text] = input.to<Tree>();
    TORCH_CHECK(count == rows && others[2].scalar_type() == torch::kLong && others[3].size(0) == 0 && text == "a text");
    TORCH_CHECK(!others[0].requires_grad() && is_even == (rows % 2 == 0));
    return Tree{linear(stack, i, x) * factor + others[0] * others[1], others, count, factor, is_even, text};
  };
  compare(4, layer, [](const PipelineValue& output) { return std::get<0>(output.to<Tree>()); });
}

TEST(PipelineValues, MayHaveNoGradient) {
  const auto layer = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
    return linear(stack, i, input.toTensor());
  };
  const auto result = [](const PipelineValue& output) { return output.toTensor(); };
  compare(5, layer, result, [](Stack& stack) { // the first stages are frozen
    for (int i = 0; i < 3; ++i) {
      for (auto& each : stack->linears[static_cast<size_t>(i)]->parameters()) each.set_requires_grad(false);
    }
  });
  compare(5, layer, result, [](Stack& stack) { // the last ones are
    for (int i = 2; i < 5; ++i) {
      for (auto& each : stack->linears[static_cast<size_t>(i)]->parameters()) each.set_requires_grad(false);
    }
  });
}

/// A second output of each stage that nothing reads: its gradient is undefined.
TEST(PipelineValues, MayBeUnread) {
  using Two = std::tuple<torch::Tensor, torch::Tensor>;
  const auto layer = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
    const auto x = i == 0 ? input.toTensor() : std::get<0>(input.to<Two>());
    const auto y = linear(stack, i, x);
    return Two{y, y * 2};
  };
  compare(4, layer, [](const PipelineValue& output) { return std::get<0>(output.to<Two>()); });
}

/// The gradient of the first micro-batch comes once the other rank has the outputs of all, so that none is left at the second.
TEST(PipelineValues, AreFreedOnceTheyAreSent) {
  if (world_size() > 1) return; // whose ranks are threads here
  run_ranks_as_threads(2, [] {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outputs;
    const Layer layer = [&](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
      const auto y = stack.linears[i](input.toTensor());
      if (i == 0) outputs.push_back(y.storage().getWeakStorageImpl());
      return y;
    };
    Stack model(2);
    Pipeline pipeline(split(layers_of(model, layer), pipeline_mesh()), Kind::kGPipe,
                      sum_of([](const PipelineValue& output) { return output.toTensor(); }));
    int64_t backwards = 0;
    if (world_rank() == 0) {
      model->linears[0]->weight.register_hook([&](const torch::Tensor&) {
        const auto left = std::count_if(outputs.begin(), outputs.end(), [](const auto& each) { return !each.expired(); });
        if (++backwards > 1) EXPECT_EQ(left, 0) << "at backward " << backwards;
      });
    }
    pipeline.step(std::vector<PipelineValue>(4, torch::ones({3, 5})));
    EXPECT_EQ(outputs.size(), world_rank() == 0 ? 4 : 0);
  });
}

TEST(PipelineValues, HaveTheSameDropoutOnAnyNumberOfRanks) {
  const auto layer = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
    return torch::dropout(linear(stack, i, input.toTensor()), 0.5, true);
  };
  const auto loss_of = [&](Kind kind, const DeviceMesh& mesh) {
    auto model = seeded_stack(4);
    Pipeline pipeline(split(layers_of(model, layer), mesh), kind,
                      sum_of([](const PipelineValue& output) { return output.toTensor(); }), {.seed = 5});
    double sum = 0;
    for (int step = 0; step < 2; ++step) sum += pipeline.step(std::vector<PipelineValue>(4, torch::ones({3, 5}))).item<double>();
    return sum;
  };
  const auto all = pipeline_mesh();
  const auto alone = init_device_mesh(torch::kCPU, {1, world_size()}, {"one", "others"})["one"];
  const double expected = loss_of(Kind::kGPipe, alone);
  for (const auto kind : {Kind::kGPipe, Kind::k1F1B, Kind::kZeroBubbleH1}) EXPECT_NEAR(loss_of(kind, all), expected, 1e-5);
}

// What ends a step: each on ranks of its own, since the pipeline's connections end with it.

/// The error of each rank.
std::vector<std::string> errors_of(int ranks, const std::function<void(int64_t rank)>& program) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  run_ranks_as_threads(ranks, [&] {
    const auto rank = process_context().rank();
    errors[static_cast<size_t>(rank)] = error_of([&] { program(rank); });
  });
  return errors;
}

void step_of(int64_t depth, const Layer& layer, int64_t micro_batches, Kind kind = Kind::k1F1B, int64_t rows = 2) {
  Stack model(depth);
  Pipeline pipeline(split(layers_of(model, layer), pipeline_mesh()), kind,
                    sum_of([](const PipelineValue& output) { return output.toTensor(); }));
  pipeline.step(std::vector<PipelineValue>(static_cast<size_t>(micro_batches), torch::ones({rows, 5})));
}

const Layer kPlain = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue&) -> PipelineValue {
  return linear(stack, i, input.toTensor());
};

#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(::testing::IsSubstring, part, text)

TEST(PipelineErrors, NameTheMicroBatchesThatDoNotFit) {
  if (world_size() > 1) return;
  for (const auto& error : errors_of(2, [](int64_t) { step_of(4, kPlain, 3, Kind::kDualPipeV); }))
    EXPECT_HAS(error, "the schedule dualpipe-v has 2 stages a rank (chunks), and was given 1");
  const auto deep = [](int64_t) {
    Stack model(4);
    const auto schedule = pipeline_schedule(Kind::kDualPipeV, {.ranks = 2, .micro_batches = 4, .chunks = 2});
    Pipeline pipeline(split(layers_of(model, kPlain), pipeline_mesh(), {.rank_of_stage = schedule.rank_of_stage}),
                      Kind::kDualPipeV, sum_of([](const PipelineValue& output) { return output.toTensor(); }));
    pipeline.step(std::vector<PipelineValue>(3, torch::ones({2, 5})));
  };
  for (const auto& error : errors_of(2, deep)) EXPECT_HAS(error, "the nearest that it can: 4");
  for (const auto& error : errors_of(3, [](int64_t rank) { step_of(4, kPlain, rank == 1 ? 3 : 4); }))
    EXPECT_HAS(error, "the ranks of a pipeline were not given the same: rank 0 has");
  for (const auto& error : errors_of(2, [](int64_t rank) { step_of(4, kPlain, 4, Kind::k1F1B, rank + 1); }))
    EXPECT_HAS(error, "rank 0 has T Float[1, 5], rank 1 has T Float[2, 5]");
}

TEST(PipelineErrors, NameTheStepOptionsThatDiffer) {
  if (world_size() > 1) return;
  const auto steps = [](const PipelineStepOptions& options) {
    Stack model(2);
    Pipeline pipeline(split(layers_of(model, kPlain), pipeline_mesh()), Kind::k1F1B,
                      sum_of([](const PipelineValue& output) { return output.toTensor(); }));
    pipeline.step({torch::ones({2, 5}), torch::ones({2, 5})}, options);
  };
  for (const auto& error : errors_of(2, [&](int64_t rank) { steps({.is_last = rank == 0}); }))
    EXPECT_HAS(error, "rank 1 has a step, which is not the last one before the optimizer's");
  for (const auto& error : errors_of(2, [&](int64_t rank) { steps({.count = 3.0 + static_cast<double>(rank)}); }))
    EXPECT_HAS(error, "rank 0 has a step, with the count 3, rank 1 has a step, with the count 4");
  for (const auto& error : errors_of(2, [&](int64_t) { steps({.count = 0}); }))
    EXPECT_HAS(error, "PipelineStepOptions::count is 0, by which a loss cannot be divided");
}

TEST(PipelineErrors, NameTheStageWithoutAGradient) {
  if (world_size() > 1) return;
  const auto detaches = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue& batch) -> PipelineValue {
    const auto y = kPlain(stack, i, input, batch).toTensor();
    return i == 2 ? y.detach() : y;
  };
  const auto errors = errors_of(3, [&](int64_t) { step_of(3, detaches, 4); });
  EXPECT_HAS(errors[2], "the loss of stage 2 (layer 'layer2') requires no gradient");
  for (const auto rank : {0, 1})
    EXPECT_HAS(errors[static_cast<size_t>(rank)], "the pipeline has ended on rank 2: rank 2: the loss of");
}

TEST(PipelineErrors, NameTheReadOfAnotherStage) {
  if (world_size() > 1) return;
  const auto reads = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue& batch) -> PipelineValue {
    const auto y = kPlain(stack, i, input, batch).toTensor();
    return i == 3 ? y + stack.linears[0]->bias : y;
  };
  auto errors = errors_of(2, [&](int64_t) { step_of(4, reads, 2); });
  EXPECT_HAS(errors[1], "stage 1 (layers 'layer2' to 'layer3') reads linear0.bias of stage 0 (layers 'layer0' to 'layer1')");
  EXPECT_HAS(errors[1], "in layer 'layer3' of stage 1");
  errors = errors_of(1, [&](int64_t) { // of a stage on the same rank
    Stack model(4);
    Pipeline pipeline(split(layers_of(model, reads), pipeline_mesh(), {.chunks = 2}), Kind::kInterleaved1F1B,
                      sum_of([](const PipelineValue& output) { return output.toTensor(); }));
    pipeline.step(std::vector<PipelineValue>(2, torch::ones({2, 5})));
  });
  EXPECT_HAS(errors[0], "reads linear0.bias of stage 0");
}

TEST(PipelineErrors, ReachAllRanksAndEndThePipeline) {
  if (world_size() > 1) return;
  const auto throws = [](StackImpl& stack, size_t i, const PipelineValue& input, const PipelineValue& batch) -> PipelineValue {
    TORCH_CHECK(i != 1, "out of luck");
    return kPlain(stack, i, input, batch);
  };
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of(4, [&](int64_t) { step_of(4, throws, 4); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_HAS(errors[1], "out of luck");
  for (const auto rank : {0, 2, 3}) {
    EXPECT_HAS(errors[static_cast<size_t>(rank)], "the pipeline has ended on rank 1: out of luck");
    EXPECT_HAS(errors[static_cast<size_t>(rank)], c10::str("Here, on rank ", rank));
  }
}

TEST(PipelineErrors, NameShapesThatChange) {
  if (world_size() > 1) return;
  const auto changes = [calls = std::make_shared<std::atomic<int>>(0)](StackImpl& stack, size_t i, const PipelineValue& input,
                                                                       const PipelineValue& batch) -> PipelineValue {
    const auto y = kPlain(stack, i, input, batch).toTensor();
    return i == 0 && calls->fetch_add(1) == 1 ? torch::cat({y, y}) : y;
  };
  const auto errors = errors_of(2, [&](int64_t) { step_of(2, changes, 2); });
  EXPECT_HAS(errors[0], "tensor 0 is Float[4, 5] with a gradient, and was Float[2, 5] with a gradient");
  EXPECT_HAS(errors[0], "dynamic_shapes");
  const auto dynamic = [&](int64_t) {
    Stack model(2);
    Pipeline pipeline(split(layers_of(model, changes), pipeline_mesh()), Kind::k1F1B,
                      sum_of([](const PipelineValue& output) { return output.toTensor(); }), {.dynamic_shapes = true});
    for (int step = 0; step < 2; ++step) pipeline.step(std::vector<PipelineValue>(2, torch::ones({2, 5})));
  };
  for (const auto& error : errors_of(2, dynamic)) EXPECT_EQ(error, "no error");
}

} // namespace
} // namespace tessera::testing::values_test
