// Values "auto" of a config, and what fills them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <variant>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/training/config/parsed_config.h>

namespace tessera::testing::auto_test {
namespace {

// as Hugging Face's Trainer fills them
TEST(ConfigAuto, IsFilledFromTheArguments) {
  const auto* text = R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                                                      "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"},
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}
  })";
  const TrainArguments arguments{.ranks = 2,
                                 .micro_batch_size = 4,
                                 .accumulation_steps = 3,
                                 .max_grad_norm = 0.5,
                                 .learning_rate = 2e-4,
                                 .weight_decay = 0.1,
                                 .adam_beta1 = 0.8,
                                 .adam_beta2 = 0.9,
                                 .adam_epsilon = 1e-6,
                                 .warmup_steps = 10,
                                 .total_steps = 100,
                                 .fp16 = false,
                                 .bf16 = true};
  const auto config = TrainConfig::parse(text, arguments, "ds.json");
  EXPECT_EQ(config.batch.train, 24);
  EXPECT_EQ(config.trainer.max_grad_norm, 0.5);
  const auto& adam = std::get<torch::optim::AdamWOptions>(config.optimizer);
  EXPECT_EQ(adam.lr(), 2e-4);
  EXPECT_EQ(adam.betas(), std::make_tuple(0.8, 0.9));
  EXPECT_EQ(adam.eps(), 1e-6);
  EXPECT_EQ(adam.weight_decay(), 0.1);
  const auto& decay = std::get<WarmupDecayOptions>(config.schedule);
  EXPECT_EQ(decay.warmup_max_lr, 2e-4);
  EXPECT_EQ(decay.warmup_min_lr, 0);
  EXPECT_EQ(decay.warmup_num_steps, 10);
  EXPECT_EQ(decay.total_num_steps, 100);
  EXPECT_EQ(config.precision.name, "deepspeed");
}

TEST(ConfigAuto, FillsTheStepsOfAScheduleFromTheEndOfTheTraining) {
  const std::string schedule =
      R"("scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": "auto"}})";
  const auto steps = [&](const std::string& stop, const TrainArguments& arguments = {}) {
    const auto config = with(schedule + R"(, "tessera": {"stop_after": )" + stop + "}", arguments);
    return std::get<WarmupDecayOptions>(config.schedule).total_num_steps;
  };
  EXPECT_EQ(steps(R"(["70 steps", "2 epochs"])"), 70);
  EXPECT_EQ(steps(R"("70 steps")", {.total_steps = 50}), 50) << "the program says";
  EXPECT_THROWS_WITH(steps(R"("2 epochs")"), "total_num_steps is \"auto\", and the argument total_steps, which fills it");
}

TEST(ConfigAuto, NeedsItsArgument) {
  EXPECT_THROWS_WITH(with(R"("bf16": {"enabled": "auto"})"),
                     "ds.json: bf16.enabled is \"auto\", and the argument bf16, which fills it, is not given");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "SGD", "params": {"momentum": "auto"}})"),
                     "optimizer.params.momentum is \"auto\", which nothing fills");
  EXPECT_THROWS_WITH(with(R"("gradient_clipping": "auto", "optimizer": {"type": "SGD", "params": {"lr": "auto"}})"),
                     "ds.json: gradient_clipping is \"auto\", and the argument max_grad_norm, which fills it, is not given\n"
                     "  optimizer.params.lr is \"auto\", and the argument learning_rate");
  EXPECT_THROWS_WITH(with(R"("gradient_clipping": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}})",
                          {.max_grad_norm = 2, .learning_rate = 0.2}),
                     "ds.json: values differ from the program's arguments\n  gradient_clipping is 1.0, and max_grad_norm is 2.0\n"
                     "  optimizer.params.lr is 0.1, and learning_rate is 0.2\nWith \"auto\"");
}

} // namespace
} // namespace tessera::testing::auto_test
