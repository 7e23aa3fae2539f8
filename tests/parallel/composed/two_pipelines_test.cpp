// Two pipelines on the same ranks: of one model or of two, taking turns, and after one of them has ended.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/pipeline_stages.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing::composed::two_pipelines_test {
namespace {

using Kind = PipelineScheduleKind;

constexpr int64_t kBatches = 8, kWidth = 4;

struct StackImpl : torch::nn::Module {
  StackImpl(int64_t depth, double weight) {
    for (int64_t i = 0; i < depth; ++i)
      linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(kWidth, kWidth)));
    const torch::NoGradGuard no_grad;
    for (auto& each : this->parameters()) each.fill_(weight);
  }
  torch::Tensor layer(int64_t i, const torch::Tensor& x) {
    TORCH_CHECK(i != fails, "out of luck");
    return linears[static_cast<size_t>(i)](x).tanh();
  }
  std::vector<torch::nn::Linear> linears;
  int64_t fails = -1; ///< the layer that throws
};
using Stack = std::shared_ptr<StackImpl>;

int64_t ranks() { return world_size() == 1 ? 3 : world_size(); }

PipelineStages stages_of(const Stack& stack, const DeviceMesh& mesh) {
  PipelineLayers layers(*stack);
  for (int64_t i = 0; i < ranks(); ++i)
    layers.add(c10::str("layer", i), {c10::str("linear", i)},
               [own = stack.get(), i](const torch::Tensor& x) { return own->layer(i, x); });
  return split(layers, mesh);
}

/// The sum of the outputs' powers.
PipelineLoss power_loss(double power) {
  return {.sum = [power](const PipelineValue& output, const PipelineValue&) { return output.toTensor().pow(power).sum(); }};
}

/// Batches of `rows`, so that two pipelines send other shapes.
std::vector<PipelineValue> batches(int64_t rows) {
  std::vector<PipelineValue> all;
  for (int64_t i = 0; i < kBatches; ++i) all.emplace_back(torch::full({rows, kWidth}, 0.1 * static_cast<double>(i + 1)));
  return all;
}

/// What one process computes.
double step_alone(StackImpl& stack, double power, int64_t rows) {
  double sum = 0;
  for (const auto& each : batches(rows)) {
    auto x = each.toTensor();
    for (int64_t i = 0; i < ranks(); ++i) x = stack.layer(i, x);
    const auto loss = x.pow(power).sum();
    (loss / kBatches).backward();
    sum += loss.item<double>();
  }
  return sum / kBatches;
}

void expect_gradients(StackImpl& stack, StackImpl& twin) {
  const auto expected = twin.named_parameters();
  for (const auto& item : stack.named_parameters()) {
    if (item.value().is_meta()) continue; // of another rank
    EXPECT_TENSORS_CLOSE(item.value().grad(), expected[item.key()].grad(), 1e-5, 1e-6) << item.key();
  }
}

TEST(TwoPipelines, OfOneModelTakeTurns) {
  run_as(ranks(), [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {ranks()}, {"pp"});
    const auto stack = std::make_shared<StackImpl>(ranks(), 0.25), twin = std::make_shared<StackImpl>(ranks(), 0.25);
    const auto stages = stages_of(stack, mesh);
    Pipeline squares(stages, Kind::kZeroBubbleH1, power_loss(2));
    std::optional<Pipeline> cubes;
    cubes.emplace(stages, Kind::k1F1B, power_loss(3));
    for (int step = 0; step < 3; ++step) {
      EXPECT_NEAR(squares.step(batches(2)).item<double>(), step_alone(*twin, 2, 2), 1e-5);
      EXPECT_NEAR(cubes->step(batches(3)).item<double>(), step_alone(*twin, 3, 3), 1e-5);
      EXPECT_NEAR(cubes->evaluate(batches(1)).item<double>(), cubes->evaluate(batches(1)).item<double>(), 0);
    }
    cubes.reset(); // the other one goes on
    EXPECT_NEAR(squares.step(batches(2)).item<double>(), step_alone(*twin, 2, 2), 1e-5);
    expect_gradients(*stack, *twin);
  });
}

/// They share the connections of their ranks: what ends one ends the other, whose next call says why before it changes a number.
/// Both are followed by new ones.
TEST(TwoPipelines, EndTogether) {
  run_as(ranks(), [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {ranks()}, {"pp"});
    const auto generator = std::make_shared<StackImpl>(ranks(), 0.25), critic = std::make_shared<StackImpl>(ranks(), 0.5);
    const auto twin = std::make_shared<StackImpl>(ranks(), 0.5);
    const auto of_generator = stages_of(generator, mesh), of_critic = stages_of(critic, mesh);
    std::optional<Pipeline> first, second;
    const auto connect = [&] {
      first.emplace(of_generator, Kind::k1F1B, power_loss(2));
      second.emplace(of_critic, Kind::kZeroBubbleH1, power_loss(2));
    };
    connect();
    for (int64_t layer = 0; layer < ranks(); ++layer) {
      first->step(batches(2));
      EXPECT_NEAR(second->step(batches(2)).item<double>(), step_alone(*twin, 2, 2), 1e-5);
      generator->fails = layer;
      EXPECT_THROWS_WITH(first->step(batches(2)), "out of luck");
      generator->fails = -1;
      const auto place = c10::str("in layer 'layer", layer, "' of stage ", layer);
      EXPECT_THROWS_WITH(layer % 2 == 0 ? second->step(batches(2)) : second->evaluate(batches(2)), place);
      EXPECT_EQ(first->failure().find(place) == std::string::npos, false) << first->failure();
      EXPECT_THROWS_WITH(second->step(batches(2)), "cannot be used any more");
      expect_gradients(*critic, *twin);
      connect();
    }
    EXPECT_NEAR(second->step(batches(2)).item<double>(), step_alone(*twin, 2, 2), 1e-5);
    expect_gradients(*critic, *twin);
  });
}

/// A new pipeline on the ranks is another one's, of the same stages or not, until that has a new one too.
TEST(TwoPipelines, AreFollowedOneByOne) {
  run_as(ranks(), [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {ranks()}, {"pp"});
    const auto generator = std::make_shared<StackImpl>(ranks(), 0.25), critic = std::make_shared<StackImpl>(ranks(), 0.5);
    const auto of_generator = stages_of(generator, mesh), of_critic = stages_of(critic, mesh);
    Pipeline old(of_critic, Kind::k1F1B, power_loss(2));
    const auto before = old.step(batches(2)).item<double>();
    std::optional<Pipeline> pipeline;
    for (int turn = 0; turn < 2; ++turn) {
      pipeline.emplace(of_generator, Kind::k1F1B, power_loss(2));
      generator->fails = 1;
      EXPECT_THROWS_WITH(pipeline->step(batches(2)), "out of luck");
      generator->fails = -1;
    }
    pipeline.emplace(of_generator, Kind::k1F1B, power_loss(2));
    pipeline->step(batches(2));
    EXPECT_THROWS_WITH(old.step(batches(2)), "out of luck"); // which does not end the new one
    pipeline->step(batches(2));
    Pipeline again(of_critic, Kind::k1F1B, power_loss(2));
    EXPECT_EQ(again.step(batches(2)).item<double>(), before);
    pipeline->step(batches(2));
  });
}

} // namespace
} // namespace tessera::testing::composed::two_pipelines_test
