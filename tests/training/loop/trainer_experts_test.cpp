// A trainer's step of a model with experts.
#include <tessera/tessera.h>

#include <gtest/gtest.h>

#include <vector>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::trainer_experts_test {
namespace {

struct RoutedImpl : torch::nn::Module {
  RoutedImpl()
      : moe(register_module("moe", MoE(MoEOptions{.width = 8, .hidden = 12, .experts = 4, .losses = {.balance = 0.3, .z = 1}}))) {
  }
  torch::Tensor loss(const torch::Tensor& x) { return (x + moe(x)).square().mean(); }
  MoE moe;
};
TORCH_MODULE(Routed);

Routed make_model() {
  torch::manual_seed(11);
  return Routed();
}

TEST(TrainerExperts, WeighTheLossesOfRoutersByMicroBatchesAndTheLossScale) {
  if (world_size() > 1) GTEST_SKIP() << "the models are plain";
  torch::manual_seed(5);
  const std::vector<torch::Tensor> batches{torch::randn({6, 8}), torch::randn({6, 8}), torch::randn({6, 8})};
  for (const bool scales : {false, true}) {
    auto model = make_model(), plain = make_model();
    torch::optim::SGD optimizer(model->parameters(), 0.1), of_plain(plain->parameters(), 0.1);
    TrainerOptions options{.micro_batches = 3};
    if (scales) options.scaler = {.init_scale = 256, .enabled = true};
    Trainer<torch::Tensor> trainer(*model, optimizer, options);
    trainer.count([](const torch::Tensor& x) { return static_cast<double>(x.size(0)); });
    trainer.loss([&](const torch::Tensor& x) { return LossMean{model->loss(x)}; });
    trainer.step(batches);
    set_router_loss_scale(*plain, 1.0 / 3);
    for (const auto& x : batches) (plain->loss(x) / 3.0).backward();
    of_plain.step();
    const auto expected = plain->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_LT((item.value() - expected[item.key()]).abs().max().item<double>(), 1e-6) << item.key();
  }
}

} // namespace
} // namespace tessera::testing::trainer_experts_test
