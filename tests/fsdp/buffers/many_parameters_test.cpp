// The gradients of groups of many parameters, on every device.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/many_parameters.h>
#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing::many_parameters_test {
namespace {

TEST(ManyParameters, HaveTheGradientsOfTheUnshardedModel) {
  for (const auto& each : many_cases()) {
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
    }
  }
}

/// That every rank's shard can be cast by one copy costs no memory to speak of.
TEST(ManyParameters, ARankThatOwnsNoRowHasNoRoomForThem) {
  struct OneRow : torch::nn::Module {
    torch::Tensor weight = register_parameter("weight", torch::ones({1, 100000}));
  } model;
  FullyShardOptions options{.layout = BufferLayout::kPerParameter};
  options.mixed_precision.param_dtype = torch::kBFloat16;
  fully_shard(model, world_mesh(), options);
  const auto local = DTensor(model.weight).local();
  EXPECT_LE(local.storage().nbytes(), local.nbytes() * 9 / 8 + 4096);
  EXPECT_TRUE(unsharded(model.weight).detach().cpu().equal(torch::ones({1, 100000}, torch::kBFloat16)));
}

} // namespace
} // namespace tessera::testing::many_parameters_test
