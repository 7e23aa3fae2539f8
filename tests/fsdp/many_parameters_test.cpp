// The gradients of groups of many parameters, on every device.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/many_parameters.h>
#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {
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

} // namespace
} // namespace tessera::testing
