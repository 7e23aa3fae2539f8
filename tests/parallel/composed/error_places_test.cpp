// What an exception in a step says of where it was, on the rank that throws and on the others.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/pipeline_stages.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <any>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeindex>
#include <vector>

namespace tessera::testing::composed::error_places_test {
namespace {

using Kind = PipelineScheduleKind;

#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(::testing::IsSubstring, part, text)

/// A type of the program's own, whose words cannot be changed.
struct OutOfLuck : std::runtime_error {
  OutOfLuck() : std::runtime_error("out of luck") {}
};

struct Thrower {
  std::string name;
  std::type_index type;
  std::function<void()> act;
  bool has_place; ///< in the words of what is thrown
};

std::vector<Thrower> throwers() {
  return {{"c10::Error", typeid(c10::Error), [] { TORCH_CHECK(false, "out of luck"); }, true},
          {"c10::ValueError", typeid(c10::ValueError), [] { TORCH_CHECK_VALUE(false, "out of luck"); }, true},
          {"std::runtime_error", typeid(std::runtime_error), [] { throw std::runtime_error("out of luck"); }, true},
          {"std::out_of_range", typeid(std::out_of_range), [] { throw std::out_of_range("out of luck"); }, true},
          {"its own", typeid(OutOfLuck), [] { throw OutOfLuck(); }, false}};
}

/// What of the program throws.
enum class Where { kLayer, kLoss, kScale, kBackward, kWeight };

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(4, 4)));
    const torch::NoGradGuard no_grad;
    for (auto& each : this->parameters()) each.fill_(0.25);
  }
  std::vector<torch::nn::Linear> linears;
};

/// A pipeline of one linear layer a rank.
class Stack {
 public:
  static constexpr int64_t kBatches = 8;

  Stack(int64_t ranks, Kind kind) : ranks_(ranks), kind_(kind), stack_(std::make_shared<StackImpl>(ranks)) {
    PipelineLayers layers(*stack_);
    for (int64_t i = 0; i < ranks; ++i)
      layers.add(c10::str("layer", i), {c10::str("linear", i)}, [this, i](const torch::Tensor& x) { return layer(i, x); });
    stages_.emplace(split(layers, init_device_mesh(torch::kCPU, {ranks}, {"pp"})));
    connect();
  }
  void connect() {
    calls_ = 0;
    const PipelineLoss loss{.sum = [this](const PipelineValue& output, const PipelineValue&) {
      if (where_ == Where::kLoss) count_and_act();
      return output.toTensor().sum();
    }};
    pipeline_.emplace(*stages_, kind_, loss);
  }
  /// From now on what is at `where` of `stage` acts in micro-batch `micro_batch`; not at all without a `where`.
  void set(std::optional<Where> where, int64_t stage, int64_t micro_batch, std::function<void()> act) {
    where_ = where;
    stage_ = stage;
    micro_batch_ = micro_batch;
    act_ = std::move(act);
  }
  double step() {
    const auto scale = [this](const torch::Tensor& loss) {
      if (where_ == Where::kScale && world_rank() == ranks_ - 1) count_and_act();
      return loss;
    };
    auto& weight = stack_->linears[static_cast<size_t>(world_rank())]->weight;
    std::optional<unsigned> hook;
    if (where_ == Where::kWeight && stage_ == world_rank())
      hook = weight.register_hook([this](const torch::Tensor&) { count_and_act(); });
    const Removal removal{weight, hook};
    return pipeline_->step(batches(), {.scale = scale}).item<double>();
  }
  void evaluate() { pipeline_->evaluate(batches()); }
  void predict() { pipeline_->predict(batches()); }
  const Pipeline& pipeline() const { return *pipeline_; }

 private:
  struct Removal {
    const torch::Tensor& weight;
    std::optional<unsigned> hook;
    ~Removal() {
      if (hook) weight.remove_hook(*hook);
    }
  };
  static std::vector<PipelineValue> batches() { return std::vector<PipelineValue>(kBatches, torch::ones({2, 4})); }
  void count_and_act() {
    if (calls_++ == micro_batch_) act_();
  }
  torch::Tensor layer(int64_t i, const torch::Tensor& x) {
    if (i == stage_ && where_ == Where::kLayer) count_and_act();
    auto y = stack_->linears[static_cast<size_t>(i)](x).tanh();
    if (i == stage_ && where_ == Where::kBackward && y.requires_grad())
      y.register_hook([this](const torch::Tensor&) { count_and_act(); });
    return y;
  }

  int64_t ranks_;
  Kind kind_;
  std::shared_ptr<StackImpl> stack_;
  std::optional<PipelineStages> stages_;
  std::optional<Pipeline> pipeline_;
  std::optional<Where> where_;
  int64_t stage_ = 0, micro_batch_ = 0, calls_ = 0;
  std::function<void()> act_;
};

struct Thrown {
  std::type_index type = typeid(void);
  std::string words;
};

Thrown thrown_by(const std::function<void()>& run) try {
  run();
  return {};
} catch (const c10::Error& error) {
  return {typeid(error), error.what_without_backtrace()};
} catch (const std::exception& error) {
  return {typeid(error), error.what()};
}

/// "micro-batch 2 of 8" with what comes before it.
std::string place_of(const std::string& part, int64_t stage, int64_t micro_batch) {
  return c10::str("in ", part, " of stage ", stage, " (layer 'layer", stage, "'), micro-batch ", micro_batch, " of ",
                  Stack::kBatches);
}

int64_t ranks() { return world_size() == 1 ? 3 : world_size(); }

/// The rank of `stage` gets what was thrown, all others words with its own in them; all know the place afterwards.
void expect_place(Stack& stack, const Thrower& thrower, int64_t stage, const std::string& place,
                  const std::function<void()>& run) {
  SCOPED_TRACE(c10::str(thrower.name, ", ", place, ", rank ", world_rank()));
  const auto thrown = thrown_by(run);
  EXPECT_HAS(thrown.words, "out of luck");
  if (world_rank() == stage) {
    EXPECT_EQ(thrown.type, thrower.type) << thrown.type.name();
    if (thrower.has_place) EXPECT_HAS(thrown.words, place);
    if (!thrower.has_place) EXPECT_EQ(thrown.words, "out of luck");
  } else {
    EXPECT_EQ(thrown.type, std::type_index(typeid(c10::Error))) << thrown.type.name();
    EXPECT_HAS(thrown.words, c10::str("the pipeline has ended on rank ", stage, ": out of luck"));
    EXPECT_HAS(thrown.words, place);
    EXPECT_HAS(thrown.words, c10::str("Here, on rank ", world_rank(), ": "));
  }
  EXPECT_HAS(stack.pipeline().failure(), place);
  EXPECT_THROWS_WITH(stack.step(), "and cannot be used any more; make a new one: ");
  EXPECT_THROWS_WITH(stack.evaluate(), place);
}

using Call = std::function<void(Stack&)>;

void step(Stack& stack) { stack.step(); }

/// `call` throws what each of `all` does, in another micro-batch each time, and a new pipeline goes on.
void expect_places(Kind kind, Where where, int64_t stage, const std::string& part, const std::vector<Thrower>& all,
                   const Call& call) {
  run_as(ranks(), [&] {
    Stack stack(ranks(), kind);
    const auto before = stack.step();
    int64_t micro_batch = stage;
    for (const auto& thrower : all) {
      const auto at = ++micro_batch % Stack::kBatches;
      stack.set(where, stage, at, thrower.act);
      expect_place(stack, thrower, stage, place_of(part, stage, at), [&] { call(stack); });
      stack.set(std::nullopt, 0, 0, [] {});
      stack.connect();
      EXPECT_EQ(stack.pipeline().failure(), "");
    }
    EXPECT_EQ(stack.step(), before);
  });
}

/// On each stage; all types on the last one, and on the others one of them.
void expect_on_each_stage(Kind kind, Where where, const std::string& part, const Call& call = step) {
  const auto all = throwers();
  for (int64_t stage = 0; stage < ranks(); ++stage) {
    const bool is_last = stage + 1 == ranks();
    const auto name = part == "layer" ? c10::str("layer 'layer", stage, "'") : part;
    expect_places(kind, where, stage, name, is_last ? all : std::vector{all[static_cast<size_t>(stage)]}, call);
  }
}

TEST(PlaceOfAnError, OfALayer) { expect_on_each_stage(Kind::k1F1B, Where::kLayer, "layer"); }

TEST(PlaceOfAnError, OfTheLoss) {
  expect_places(Kind::kGPipe, Where::kLoss, ranks() - 1, "the loss", throwers(), step);
  expect_places(Kind::kZeroBubbleH1, Where::kScale, ranks() - 1, "the loss", {throwers()[2]}, step);
}

TEST(PlaceOfAnError, OfABackward) {
  expect_on_each_stage(Kind::k1F1B, Where::kBackward, "the backward");
  expect_places(Kind::kGPipe, Where::kWeight, 0, "the backward", {throwers()[4]}, step);
}

TEST(PlaceOfAnError, OfAHalfOfABackward) {
  expect_on_each_stage(Kind::kZeroBubbleH1, Where::kBackward, "the first half of the backward");
  expect_on_each_stage(Kind::kZeroBubbleH1, Where::kWeight, "the second half of the backward");
}

TEST(PlaceOfAnError, OfAnEvaluation) {
  const Call evaluate = [](Stack&stack) { stack.evaluate(); }, predict = [](Stack&stack) { stack.predict(); };
  expect_on_each_stage(Kind::k1F1B, Where::kLayer, "layer", evaluate);
  expect_places(Kind::k1F1B, Where::kLoss, ranks() - 1, "the loss", {throwers()[3]}, evaluate);
  expect_places(Kind::k1F1B, Where::kLayer, 0, "layer 'layer0'", {throwers()[0], throwers()[4]}, predict);
}

/// Sends shards as they are, until it fails to.
struct Failing final : GatherExtension {
  Sent before(const torch::Tensor& shard, const DeviceMesh&) override {
    TORCH_CHECK(!fails, "out of luck");
    return {{shard}};
  }
  torch::Tensor after(const std::vector<std::vector<torch::Tensor>>& gathered, const std::any&,
                      const torch::Tensor& out) override {
    std::vector<torch::Tensor> parts;
    for (const auto& each : gathered) parts.push_back(each[0]);
    return torch::cat(parts).view_as(out);
  }
  bool fails = false;
};

/// The gathers of a stage that is to be resident begin in an action of their own. Both ranks of the stage fail.
TEST(PlaceOfAnError, OfAGather) {
  run_as(4, [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
    StackImpl stack(4);
    PipelineLayers layers(stack);
    for (int64_t i = 0; i < 4; ++i)
      layers.add(c10::str("layer", i), {c10::str("linear", i)},
                 [&stack, i](const torch::Tensor& x) { return stack.linears[static_cast<size_t>(i)](x).tanh(); });
    auto stages = split(layers, mesh["pp"], {.chunks = 2});
    const auto failing = std::make_shared<Failing>();
    FullyShardOptions options;
    options.gather_extension_fn = [&](const std::string&, const torch::Tensor& parameter) {
      return parameter.is_same(stack.linears[2]->weight) ? failing : nullptr;
    };
    fully_shard(stages, mesh["dp"], options);
    const PipelineLoss loss{.sum = [](const PipelineValue& output, const PipelineValue&) { return output.toTensor().sum(); }};
    Pipeline pipeline(stages, Kind::kInterleaved1F1B, loss, {.data_mesh = mesh["dp"], .resident_stages = 1});
    const auto run = [&] { pipeline.step(std::vector<PipelineValue>(4, torch::ones({2, 4}))); };
    run();
    failing->fails = true;
    const auto words = thrown_by(run).words;
    EXPECT_HAS(words, "out of luck");
    if (mesh.local_rank("pp") == 1) EXPECT_HAS(words, "the pipeline has ended on rank ");
    EXPECT_HAS(words, "in the gathers of stage 2 (layer 'layer2')");
  });
}

} // namespace
} // namespace tessera::testing::composed::error_places_test
