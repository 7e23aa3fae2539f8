// What a program does after an exception in a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <optional>
#include <stdexcept>

namespace tessera::testing::composed::failures_test {
namespace {

using Kind = PipelineScheduleKind;
using Failure = std::function<std::string(SplitTraining&)>;

/// Of threads in a world of one, else of processes. The ranks of tensor parallelism would stop at different collectives.
std::vector<Shape> shapes() {
  if (world_size() == 1) return {{.pipeline = 3}, {.pipeline = 2, .shards = 2}};
  std::vector<Shape> all{{.pipeline = world_size()}};
  if (world_size() == 4) all.push_back({.pipeline = 2, .shards = 2});
  return all;
}

/// As many micro-batches as each schedule can take.
StepPlan plan_of(const Shape& shape, uint64_t seed) { return {.seed = seed, .micro_batches = 2 * shape.pipeline}; }

void fail_in_turn(SplitTraining& split, const std::vector<Failure>& failures, Kind kind) {
  for (const auto& fail : failures) {
    const auto error = fail(split);
    EXPECT_NE(error.find("out of luck"), std::string::npos) << "on rank " << world_rank() << ": " << error;
    split.change_schedule(kind);
  }
}

/// Steps with all `failures` between them, each followed by a new pipeline, end where one process does that knows only the steps.
void expect_goes_on(const Shape& shape, const std::vector<Failure>& failures, std::vector<Kind> kinds) {
  const Task task{.net = {.dtype = torch::kDouble}};
  const auto whole = make_whole(task, {.shape = shape});
  for (uint64_t step = 0; step < 3; ++step) whole->step(plan_of(shape, step));
  const auto weights = whole->weights();
  run_as(shape.ranks(), [&] {
    SplitTraining split(task, {.shape = shape, .kind = kinds[0]});
    for (uint64_t step = 0; step < 3; ++step) {
      if (step > 0) fail_in_turn(split, failures, kinds[step % kinds.size()]);
      split.step(plan_of(shape, step));
    }
    expect_same(split, whole->numbers, weights, 1e-9);
  });
}

TEST(AfterAnException, ANewPipelineGoesOn) {
  for (const auto& shape : shapes()) {
    for (const int64_t block : {0, 2, 5}) { // of the first stage, one in the middle, and the last one
      SCOPED_TRACE(c10::str(shape.text(), ", block ", block));
      expect_goes_on(shape, {[&](SplitTraining& split) { return split.fail(plan_of(shape, 70), block); }},
                     {Kind::kZeroBubbleH1, Kind::kGPipe});
    }
  }
}

TEST(AfterAnException, ANewPipelineOfSeveralStagesARankGoesOn) {
  for (const auto& shape : shapes()) {
    for (const auto& kinds :
         std::vector<std::vector<Kind>>{{Kind::kInterleaved1F1B, Kind::kInterleavedZeroBubble}, {Kind::kZeroBubbleV}}) {
      SCOPED_TRACE(c10::str(shape.text(), ", schedule ", static_cast<int>(kinds[0])));
      expect_goes_on(shape, {[&](SplitTraining& split) { return split.fail(plan_of(shape, 70), 3); }}, kinds);
    }
  }
}

/// One failure after another, in forwards and backwards, in a later micro-batch too, without a step between them.
TEST(AfterAnException, AnotherOneMayFollow) {
  for (const auto& shape : shapes()) {
    if (shape.ranks() > shape.pipeline) continue; // whose data ranks would have reduced, or not, as they hear of it
    SCOPED_TRACE(shape.text());
    const auto plan = plan_of(shape, 70);
    expect_goes_on(shape,
                   {[&](SplitTraining& split) { return split.fail(plan, 2, 1); },
                    [&](SplitTraining& split) { return split.fail_in_backward(plan, 3); },
                    [&](SplitTraining& split) { return split.fail_in_backward(plan, 1, 2); },
                    [&](SplitTraining& split) { return split.fail_in_evaluation(plan, 4); }},
                   {Kind::k1F1B, Kind::kZeroBubbleH1});
  }
}

/// The last action of the first rank throws: the others have done all of theirs.
TEST(AfterAnException, TheOthersHearOfItAtTheEndOfAStep) {
  for (const auto& shape : shapes()) {
    if (shape.ranks() > shape.pipeline) continue; // where data ranks reduce before the hook
    for (const std::string name : {"places.weight", "blocks.0.dense.up.weight"}) {
      SCOPED_TRACE(c10::str(shape.text(), ", ", name));
      expect_goes_on(shape, {[&](SplitTraining& split) { return split.fail_in_gradient(plan_of(shape, 70), name); }},
                     {Kind::kZeroBubbleH1, Kind::kGPipe});
    }
  }
}

TEST(AfterAnException, TheOldPipelineIsAnError) {
  for (const auto& shape : shapes()) {
    run_as(shape.ranks(), [&] {
      SplitTraining split({}, {.shape = shape});
      split.fail({.seed = 1}, 0);
      EXPECT_THROWS_WITH(split.step({.seed = 2}), "this pipeline had an error in an earlier step");
    });
  }
}

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(4, 4)));
  }
  std::vector<torch::nn::Linear> linears;
};

/// A pipeline of one linear layer a rank, any of whose functions may throw.
class Stack {
 public:
  enum class Place {
    kNone,
    kAllLayers,
    kLastLayer,
    kLayerWithoutAText,
    kLossSum,
    kLossCount,
    kCountWithoutAText,
    kBatch,
    kScale
  };

  explicit Stack(int64_t ranks) : stack_(std::make_shared<StackImpl>(ranks)) {
    const torch::NoGradGuard no_grad;
    for (auto& each : stack_->parameters()) each.fill_(0.25);
    PipelineLayers layers(*stack_);
    for (int64_t i = 0; i < ranks; ++i) {
      layers.add(c10::str("layer", i), {c10::str("linear", i)}, [this, i, ranks](const torch::Tensor& x) {
        throw_at(Place::kAllLayers);
        if (i + 1 == ranks) throw_at(Place::kLastLayer);
        if (i == 0) throw_number_at(Place::kLayerWithoutAText);
        return stack_->linears[static_cast<size_t>(i)](x).tanh();
      });
    }
    stages_.emplace(split(layers, init_device_mesh(torch::kCPU, {ranks}, {"pp"})));
    connect();
  }
  void connect() {
    const PipelineLoss loss{.sum =
                                [this](const PipelineValue& output, const PipelineValue&) {
                                  throw_at(Place::kLossSum);
                                  return output.toTensor().sum();
                                },
                            .count =
                                [this](const PipelineValue&) {
                                  throw_at(Place::kLossCount);
                                  throw_number_at(Place::kCountWithoutAText);
                                  return 2.0;
                                }};
    pipeline_.emplace(*stages_, Kind::kZeroBubbleH1, loss);
  }
  void evaluate() { pipeline_->evaluate(batches()); }
  void predict() { pipeline_->predict(batches()); }
  double step() {
    const auto scale = [this](const torch::Tensor& loss) {
      throw_at(Place::kScale);
      return loss;
    };
    return pipeline_->step(batches(), {.scale = scale}).item<double>();
  }
  std::string error_of_step() try {
    step();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  } catch (int number) {
    return c10::str("the number ", number);
  }

  Place place = Place::kNone;

 private:
  std::vector<PipelineValue> batches() const {
    std::vector<PipelineValue> all(6, torch::ones({2, 4}));
    if (place == Place::kBatch && world_rank() == 0) all[1] = torch::Device(torch::kCPU);
    return all;
  }
  void throw_at(Place where) const {
    if (place == where) throw std::runtime_error("out of luck");
  }
  void throw_number_at(Place where) const {
    if (place == where && world_rank() == 0) throw 7; // NOLINT: programs do
  }

  std::shared_ptr<StackImpl> stack_;
  std::optional<PipelineStages> stages_;
  std::optional<Pipeline> pipeline_;
};

/// Whatever is thrown, by whichever of the program's functions, on one rank or on all at once.
TEST(AfterAnException, EveryFunctionOfTheProgramMayThrow) {
  using enum Stack::Place;
  const auto ranks = world_size() == 1 ? 3 : world_size();
  run_as(ranks, [&] {
    Stack stack(ranks);
    const auto before = stack.step();
    for (const auto place : {kAllLayers, kLayerWithoutAText, kLossSum, kLossCount, kScale, kAllLayers}) {
      SCOPED_TRACE(static_cast<int>(place));
      stack.place = place;
      const auto error = stack.error_of_step();
      const bool has_no_text = place == kLayerWithoutAText;
      const auto expected = !has_no_text ? "out of luck" : world_rank() == 0 ? "the number 7" : "no std::exception";
      EXPECT_NE(error.find(expected), std::string::npos) << error;
      stack.place = kNone;
      if (place != kLossCount) stack.connect(); // of the counts all ranks hear before anything is sent
      EXPECT_EQ(stack.step(), before);
    }
  });
}

/// Of the counts all ranks hear, whatever was thrown, and the pipeline goes on.
TEST(AfterAnException, ACountThatOneRankCannotTellIsAnErrorOnAll) {
  const auto ranks = world_size() == 1 ? 3 : world_size();
  run_as(ranks, [&] {
    Stack stack(ranks);
    const auto before = stack.step();
    stack.place = Stack::Place::kCountWithoutAText;
    EXPECT_THROWS_WITH(stack.step(), "rank 0 has an exception that is no std::exception");
    EXPECT_THROWS_WITH(stack.evaluate(), "rank 0 has an exception that is no std::exception");
    stack.place = Stack::Place::kNone;
    EXPECT_EQ(stack.step(), before);
  });
}

TEST(AfterAnException, AMicroBatchThatOneRankCannotSendIsAnErrorOnAll) {
  const auto ranks = world_size() == 1 ? 3 : world_size();
  run_as(ranks, [&] {
    Stack stack(ranks);
    const auto before = stack.step();
    stack.place = Stack::Place::kBatch;
    EXPECT_THROWS_WITH(stack.step(), "rank 0 has a micro-batch has a Device in it");
    EXPECT_THROWS_WITH(stack.evaluate(), "rank 0 has a micro-batch has a Device in it");
    EXPECT_THROWS_WITH(stack.predict(), "rank 0 has a micro-batch has a Device in it");
    stack.place = Stack::Place::kNone;
    EXPECT_EQ(stack.step(), before);
  });
}

/// The first ranks have nothing left to do when the last one throws.
TEST(AfterAnException, AllRanksHearOfOneInAPrediction) {
  const auto ranks = world_size() == 1 ? 3 : world_size();
  run_as(ranks, [&] {
    Stack stack(ranks);
    const auto before = stack.step();
    stack.place = Stack::Place::kLastLayer;
    EXPECT_THROWS_WITH(stack.predict(), "out of luck");
    stack.place = Stack::Place::kNone;
    stack.connect();
    stack.predict();
    EXPECT_EQ(stack.step(), before);
  });
}

/// What one rank alone is given wrong is an error of all, and a pipeline may follow.
TEST(AfterAnException, AnErrorOfTheConstructorIsOneOnAllRanks) {
  const auto ranks = world_size() == 1 ? 3 : world_size();
  run_as(ranks, [&] {
    StackImpl stack(ranks);
    PipelineLayers layers(stack);
    for (int64_t i = 0; i < ranks; ++i)
      layers.add(c10::str("layer", i), {c10::str("linear", i)},
                 [&, i](const torch::Tensor& x) { return stack.linears[static_cast<size_t>(i)](x); });
    const auto stages = split(layers, init_device_mesh(torch::kCPU, {ranks}, {"pp"}));
    const PipelineLoss loss{.sum = [](const PipelineValue& output, const PipelineValue&) { return output.toTensor().sum(); }};
    for (const bool has_loss : {true, false}) {
      PipelineOptions options;
      if (has_loss && world_rank() == 1) options.resident_stages = -1;
      EXPECT_THROWS_WITH(Pipeline(stages, Kind::k1F1B, has_loss || world_rank() == 1 ? loss : PipelineLoss(), options),
                         has_loss ? "rank 1 has Pipeline: resident_stages is -1, but must not be negative"
                                  : "rank 0 has Pipeline: PipelineLoss::sum is no function");
    }
    Pipeline pipeline(stages, Kind::k1F1B, loss);
    EXPECT_NO_THROW(pipeline.step(std::vector<PipelineValue>(4, torch::ones({2, 4}))));
  });
}

} // namespace
} // namespace tessera::testing::composed::failures_test
