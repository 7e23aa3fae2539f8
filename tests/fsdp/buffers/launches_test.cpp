// What a group launches beside its collectives, on the simulated device, which counts as CUDA does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/many_parameters.h>
#include <tessera/tests/fsdp/streams.h>

namespace tessera::testing::launches_test {
namespace {

using ::testing::Le;
using ::testing::Pair;

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

TEST_F(Streams, LaunchesOfAGroupDoNotDependOnItsParametersOrTheRanks) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  const std::vector<std::pair<int64_t, int64_t>> of_a_few{{0, 1}, {1, 2}, {1, 1}, {2, 2}}; // pieces that one launch takes
  const auto all = many_cases();
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(launches_of(9, Rows::kEven, all[i].options), of_a_few[i]) << all[i].name;
  for (const auto& each : all) {
    for (const auto rows : {Rows::kEven, Rows::kUneven}) {
      for (const int64_t parameters : {9, 40, 150}) {
        SCOPED_TRACE(c10::str(each.name, ", ", parameters, rows == Rows::kEven ? " even" : " uneven"));
        EXPECT_THAT(launches_of(parameters, rows, each.options), Pair(Le(each.most_of_gather), Le(each.most_of_reduction)));
      }
    }
  }
  EXPECT_EQ(launches_of(9, Rows::kEven, {}, 3), (std::pair<int64_t, int64_t>(0, 1))) << "the collective divides";
}

/// CUDA's kernel for lists of copies does not know their types.
TEST_F(Streams, ParametersOfRareTypesAreGatheredBesideOthers) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto dtype : {torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kFloat8_e8m0fnu}) {
      SCOPED_TRACE(c10::str(dtype, layout == BufferLayout::kRagged ? ", ragged" : ", per parameter"));
      const auto bytes = torch::arange(1, 1 + 6 * static_cast<int64_t>(c10::elementSize(dtype)), torch::kByte);
      torch::manual_seed(0);
      torch::nn::Linear linear(4, 3);
      linear->register_parameter("table", bytes.view(dtype), /*requires_grad=*/false);
      fully_shard(*linear, world_mesh(), {.mixed_precision = {.param_dtype = torch::kBFloat16}, .layout = layout});
      fsdp(*linear).unshard();
      const auto whole = unsharded(linear->named_parameters()["table"]).detach().to(torch::kCPU);
      EXPECT_TRUE(torch::equal(whole.view(torch::kByte), bytes.view(dtype).to(whole.scalar_type()).view(torch::kByte)));
    }
  }
}

} // namespace
} // namespace tessera::testing::launches_test
