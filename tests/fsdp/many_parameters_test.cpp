// Groups of many parameters on the simulated device: as many launches as groups of a few, and the same gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/streams.h>

namespace tessera::testing {
namespace {

using ::testing::Le;
using ::testing::Pair;

enum class Rows { kEven, kUneven, kAny };

/// Rows of parameter `i`: as many on each of up to 4 ranks, or fewer on the last, or none on some.
int64_t rows_of(int64_t i, Rows rows) {
  switch (rows) {
    case Rows::kEven: return 4 * (1 + i % 3);
    case Rows::kUneven: return 3 + i % 4;
    case Rows::kAny: return i % 6;
  }
  return 0;
}

/// A group of P parameters of integers, whose gradients every dtype can hold.
struct ManyImpl : torch::nn::Module {
  ManyImpl(int64_t count, Rows rows) {
    for (int64_t i = 0; i < count; ++i) {
      const auto sizes = i % 7 == 3 ? std::vector<int64_t>{rows_of(i, rows)} : std::vector<int64_t>{rows_of(i, rows), 1 + i % 5};
      const auto values = torch::arange(c10::multiply_integers(sizes)).remainder(11).to(torch::kFloat) - 5;
      weights.push_back(register_parameter(c10::str("w", i), values.reshape(sizes)));
    }
  }
  /// Of which the gradients are w, or twice w for every other one.
  torch::Tensor forward() {
    torch::Tensor sum;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto term = (weights[i] * weights[i]).sum().to(torch::kFloat) * (i % 2 == 0 ? 0.5 : 1.0);
      sum = sum.defined() ? sum + term : term;
    }
    return sum;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Many);

struct Case {
  std::string name;
  FullyShardOptions options;
  int64_t most_of_gather, most_of_reduction; ///< launches
};

std::vector<Case> cases() {
  const MixedPrecisionPolicy bf16{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  std::vector<Case> all{
      {"ragged", {}, 0, 2}, {"ragged in bf16", {}, 2, 3}, {"per parameter", {}, 3, 3}, {"per parameter in bf16", {}, 3, 3}};
  all[1].options.mixed_precision = all[3].options.mixed_precision = bf16;
  all[2].options.layout = all[3].options.layout = BufferLayout::kPerParameter;
  return all;
}

int64_t launches_since_reset() {
  int64_t count = 0;
  for (const auto& [key, times] : sim::counters().launches) {
    const bool is_collective = key.first.find('\'') != std::string::npos;
    if (!is_collective) count += times;
  }
  return count;
}

/// What the gather and the reduction of a group launch beside their collectives.
std::pair<int64_t, int64_t> launches_of(int64_t parameters, Rows rows, const FullyShardOptions& options,
                                        std::optional<double> divide_factor = {}) {
  const auto backward_of = [](Many& model) {
    const auto loss = model->forward();
    sim::reset_counters();
    loss.backward();
    return launches_since_reset();
  };
  Many plain(parameters, rows);
  plain->to(sim::kDevice);
  if (options.mixed_precision.param_dtype) plain->to(*options.mixed_precision.param_dtype);
  const auto unsharded_backward = backward_of(plain);
  Many model(parameters, rows);
  auto handle = fully_shard(*model, world_mesh(), options);
  if (divide_factor) handle.set_gradient_divide_factor(*divide_factor);
  for (int i = 0; i < 2; ++i) backward_of(model);
  for (auto& weight : model->parameters()) weight.mutable_grad() = torch::Tensor();
  const auto reduction = backward_of(model) - unsharded_backward;
  fsdp(*model).reshard();
  sim::reset_counters();
  fsdp(*model).unshard();
  return {launches_since_reset(), reduction};
}

class ManyParameters : public Streams {};

TEST_F(ManyParameters, LaunchesOfAGroupDoNotDependOnItsParametersOrTheRanks) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  for (const auto& each : cases()) {
    for (const auto rows : {Rows::kEven, Rows::kUneven}) {
      for (const int64_t parameters : {9, 40, 150}) {
        SCOPED_TRACE(c10::str(each.name, ", ", parameters, rows == Rows::kEven ? " even" : " uneven"));
        EXPECT_THAT(launches_of(parameters, rows, each.options), Pair(Le(each.most_of_gather), Le(each.most_of_reduction)));
      }
    }
  }
  EXPECT_EQ(launches_of(9, Rows::kEven, {}, 3), (std::pair<int64_t, int64_t>(0, 1))) << "the collective divides";
}

TEST_F(ManyParameters, HaveTheGradientsOfTheUnshardedModel) {
  for (const auto& each : cases()) {
    for (const auto rows : {Rows::kEven, Rows::kUneven, Rows::kAny}) {
      SCOPED_TRACE(c10::str(each.name, ", rows ", static_cast<int>(rows)));
      constexpr int64_t kParameters = 150;
      Many model(kParameters, rows), plain(kParameters, rows);
      fully_shard(*model, world_mesh(), each.options);
      for (int step = 1; step <= 3; ++step) { // the second without some parameters, on one rank
        model->zero_grad();
        auto loss = model->forward() * (1 + world_rank());
        if (step == 2 && world_rank() == 0) loss = (model->weights[0] * model->weights[0]).sum().to(torch::kFloat) * 0.5;
        loss.backward();
        if (step == 2) continue;
        const double factor = (1 + world_size()) / 2.0; // the mean over the ranks
        for (size_t i = 0; i < plain->weights.size(); ++i) {
          const auto expected = plain->weights[i].detach() * factor * (i % 2 == 0 ? 1 : 2);
          const auto& gradient = model->weights[i].grad();
          EXPECT_TRUE(DTensor(gradient).full_tensor().cpu().equal(expected)) << "w" << i << " in step " << step;
        }
      }
      fsdp(*model).unshard();
      for (size_t i = 0; i < plain->weights.size(); ++i)
        EXPECT_TRUE(unsharded(model->weights[i]).cpu().to(torch::kFloat).equal(plain->weights[i])) << "w" << i;
      expect_no_races();
    }
  }
}

} // namespace
} // namespace tessera::testing
