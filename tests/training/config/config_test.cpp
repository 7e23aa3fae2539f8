#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <sstream>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/training/config/parsed_config.h>
#include <tessera/training/config/keys/config_key.h>
#include <tessera/training/train_config.h>

namespace tessera::testing::config_test {
namespace {

using tessera::Strategy; // beside that of the tests
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// what a user of stage 2 brought
constexpr auto* kStage2 = R"({
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 2e8,
    "allgather_bucket_size": 2e8
  },
  "bf16": {"enabled": "true"}
})";

// and one of stage 3
constexpr auto* kStage3 = R"({
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 8,
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "steps_per_print": 100,
  "wall_clock_breakdown": false
})";

TEST(Config, AFileOfStage2RunsAsItIs) {
  const auto config = TrainConfig::parse(kStage2, {.ranks = 4});
  EXPECT_EQ(config.sharding.strategy, Strategy::kZero2);
  EXPECT_EQ(config.batch.accumulation, 4);
  EXPECT_EQ(config.trainer.micro_batches, 4);
  EXPECT_EQ(config.trainer.max_grad_norm, 1) << "DeepSpeed's default";
  EXPECT_EQ(config.trainer.non_finite, NonFinite::kSkip);
  EXPECT_FALSE(config.trainer.scaler.enabled);
  EXPECT_EQ(config.precision.name, "deepspeed");
  EXPECT_EQ(config.precision.parameters, torch::kFloat);
  EXPECT_EQ(config.precision.policy.param_dtype, torch::kBFloat16);
  EXPECT_EQ(config.precision.policy.reduce_dtype, torch::kBFloat16);
  EXPECT_THAT(config.notes, Contains("zero_optimization.overlap_comm has no effect here: communication always overlaps"));
  EXPECT_THAT(config.notes, Contains(HasSubstr("gradient_clipping is not given, and 1.0")));
  EXPECT_EQ(config.notes.size(), 5);
  EXPECT_FALSE(config.has_optimizer());
  EXPECT_THROWS_WITH(config.make_optimizer(std::vector<torch::Tensor>{}), "config: there is no optimizer");
}

TEST(Config, AFileOfStage3WithOffloadRunsAsItIs) {
  const auto config = TrainConfig::parse(kStage3, {.ranks = 4});
  EXPECT_EQ(config.sharding.strategy, Strategy::kFullShard);
  EXPECT_EQ(config.sharding.offload, offload_to_host());
  EXPECT_EQ(config.batch.train, 64);
  EXPECT_EQ(config.trainer.log.every, 100);
  EXPECT_EQ(config.shard_options().offload, offload_to_host());
}

TEST(Config, TakesJsonAsPeopleWriteIt) {
  const auto config = TrainConfig::parse(R"(// a comment, with a "quote" and {braces}
{
  # another
  "train_batch_size": 8, /* and
  one of two lines */
  "optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.95,],}},
  "tessera": {"log": {"jsonl": "a // no comment, # none either /* .jsonl"}},
})");
  EXPECT_EQ(config.trainer.log.jsonl, "a // no comment, # none either /* .jsonl");
  EXPECT_EQ(std::get<torch::optim::AdamWOptions>(config.optimizer).betas(), std::make_tuple(0.9, 0.95));
  const auto parse = [](const std::string& text) { return TrainConfig::parse(text, {}, "ds.json"); };
  EXPECT_THROWS_WITH(parse("{\"train_batch_size\": 1 /* no end"), "ds.json: the comment that begins in line 1 does not end");
  EXPECT_THROWS_WITH(parse("{\n\"a\" 1}"),
                     "ds.json: not valid JSON: [json.exception.parse_error.101] parse error at line 2, column 5");
  EXPECT_THROWS_WITH(parse("{\"train_batch_size\": 1, \"train_batch_size\": 2}"),
                     "ds.json: key \"train_batch_size\" appears twice");
  EXPECT_THROWS_WITH(parse(" \n"), "ds.json: the config is empty");
  EXPECT_THROWS_WITH(parse("distributed_type: FSDP"), "tessera-config convert ds.json");
  EXPECT_THROWS_WITH(parse("{\"train_batch_size\": 1} x"), "ds.json: not valid JSON");
  EXPECT_THROWS_WITH(TrainConfig::read("/nowhere/ds.json"), "cannot read the config /nowhere/ds.json: No such file");
}

TEST(Config, TakesValuesOfTheTypesThatDeepSpeedTakes) {
  EXPECT_TRUE(with(R"("fp16": {"enabled": "True", "initial_scale_power": "8"})").trainer.scaler.enabled);
  EXPECT_EQ(with(R"("steps_per_print": 2e3)").trainer.log.every, 2000);
  EXPECT_EQ(with(R"("gradient_clipping": "0.5")").trainer.max_grad_norm, 0.5);
  EXPECT_THROWS_WITH(with(R"("bf16": {"enabled": "perhaps"})"),
                     "ds.json: bf16.enabled is \"perhaps\", but must be of the type boolean");
  EXPECT_THROWS_WITH(with(R"("steps_per_print": 2.5)"), "ds.json: steps_per_print is 2.5, but must be of the type integer");
  EXPECT_THROWS_WITH(with(R"("steps_per_print": 1e30)"), "ds.json: steps_per_print is 1e+30");
  EXPECT_THROWS_WITH(with(R"("bf16": true)"), "ds.json: bf16 is true, but must be of the type block");
  EXPECT_THROWS_WITH(with(R"("gradient_clipping": [1])"), "must be of the type number");
  EXPECT_THROWS_WITH(with(R"("tessera": {"pipeline": {"resident_stages": -1}})"),
                     "ds.json: tessera.pipeline.resident_stages is -1, but must not be negative");
  EXPECT_THROWS_WITH(with(R"("gradient_clipping": -1)"), "ds.json: gradient_clipping is -1, but must not be negative");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 2, "offload_optimizer": {"device": "cpi"})"),
                     "offload_optimizer.device is \"cpi\", but must be one of none, cpu, nvme; did you mean \"cpu\"?");
}

TEST(Config, NamesTheNearestOfAnUnknownKey) {
  EXPECT_THROWS_WITH(with(R"("gradient_cliping": 1)"),
                     "ds.json: the key gradient_cliping is unknown; did you mean \"gradient_clipping\"?");
  EXPECT_THROWS_WITH(with_zero(R"("stages": 3)"), "the key zero_optimization.stages is unknown; did you mean \"stage\"?");
  EXPECT_THROWS_WITH(with(R"("tessera": {"stop_afte": "1 step"})"),
                     "the key tessera.stop_afte is unknown; did you mean \"stop_after\"?");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "AdmW"})"),
                     "optimizer.type is AdmW, which is no optimizer here; did you mean \"AdamW\"?");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupLr"})"), "which is no schedule here; did you mean \"WarmupLR\"?");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "Lion", "params": {"eps": 1e-8}})"),
                     "ds.json: optimizer.params.eps is no parameter of Lion");
  EXPECT_THROWS_WITH(with(R"("cuda_visible_devices": 0)"), "the key cuda_visible_devices is unknown");
}

TEST(Config, RefusesWhatIsNotHere) {
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "zero_quantized_nontrainable_weights": true)"),
                     "ds.json: zero_optimization.zero_quantized_nontrainable_weights is true, which is not here: frozen");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1})"),
                     "optimizer.type is OneBitAdam, which reduces between ranks that have the whole model");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "Adam", "params": {"bias_correction": false}})"),
                     "bias_correction is false, which is not here");
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}})"), "the key is `gradient_clipping`");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "OneCycle"})"), "scheduler.type is \"OneCycle\", which is not here");
  EXPECT_THROWS_WITH(with(R"("elasticity": {"enabled": true})"),
                     "ds.json: elasticity is not here: a checkpoint resumes on any number");
  EXPECT_THROWS_WITH(with(R"("gradient_allreduce_op": "sum")"), "ds.json: gradient_allreduce_op is \"sum\", which is not here");
  EXPECT_THROWS_WITH(
      with(R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "zero_optimization": {"stage": 1})"),
      "both must be true or both false");
  const auto idle = with(
      R"("gradient_clipping": 0, "elasticity": {"enabled": false}, "zero_optimization": {"stage": 3, "zero_quantized_weights": false},
                            "amp": {"enabled": false}, "sparse_gradients": false, "flops_profiler": {"enabled": false},
                            "compression_training": {"layer_reduction": {"enabled": false}, "row_pruning": {"shared_parameters": {"enabled": false}}})");
  EXPECT_THROWS_WITH(
      with(
          R"("compression_training": {"layer_reduction": {"enabled": false}, "row_pruning": {"shared_parameters": {"enabled": true}}})"),
      "ds.json: compression_training is not here: models are not compressed");
  EXPECT_THAT(idle.notes, ElementsAre());
}

TEST(Config, RefusesOptionsOfAnotherStage) {
  EXPECT_THROWS_WITH(with_zero(R"("stage": 2, "stage3_max_live_parameters": 1e8)"),
                     "stage3_max_live_parameters is an option of stage 3, but zero_optimization.stage is 2");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "allgather_bucket_size": 1e8)"),
                     "allgather_bucket_size is an option of the stages 1 to 2, but zero_optimization.stage is 3");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 2, "offload_param": {"device": "cpu"})"),
                     "offload_param.device is an option of stage 3");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 1, "zero_hpz_partition_size": 4)"), "zero_hpz_partition_size is an option of stage 3");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 4)"), "zero_optimization.stage is 4, but must be 0, 1, 2 or 3");
  EXPECT_EQ(with_zero(R"("stage": 2, "offload_param": {"device": "none"}, "zero_hpz_partition_size": 1)").sharding.strategy,
            Strategy::kZero2);
}

TEST(Config, SendsFewerBits) {
  const auto zero = with_zero(R"("stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": true)").sharding;
  ASSERT_TRUE(zero.communication.gather && zero.communication.reduction);
  EXPECT_EQ(zero.communication.gather->codec, (BlockCodec{Wire::kInt8, 256}));
  EXPECT_EQ(zero.communication.reduction->description(), "int4 in blocks of 256, from 2048 elements on");
  const auto plain = with_zero(R"("stage": 3)").sharding.communication;
  EXPECT_FALSE(plain.gather || plain.reduction);
  const auto own = with(R"("tessera": {"communication": "reduction=int8, inner=fp8, error_feedback, block=64, smallest=9"},
                           "zero_optimization": {"stage": 2})")
                       .sharding.communication;
  EXPECT_FALSE(own.gather);
  EXPECT_EQ(own.reduction->description(),
            "int8 in blocks of 64 (inside: fp8 in blocks of 64), from 9 elements on, with error feedback");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 2, "zero_quantized_weights": true)"),
                     "zero_quantized_weights is an option of stage 3");
  const auto fails = [](const std::string& text) { with(R"("tessera": {"communication": ")" + text + R"("})"); };
  EXPECT_THROWS_WITH(
      fails("gater=int8"),
      "ds.json: tessera.communication: communication \"gater=int8\": gater is no setting; did you mean \"gather\"?");
  EXPECT_THROWS_WITH(fails("gather=int9"), "gather is int9, but must be int8, int4, fp8 or sign");
  EXPECT_THROWS_WITH(fails("reduction=powersgd"), "reduction is powersgd, but must be int8, int4, fp8 or sign, or power-sgd");
  EXPECT_THROWS_WITH(fails("gather=int8 gather=int4"), "gather is there twice");
  EXPECT_THROWS_WITH(fails("gather"), "gather has no value");
  EXPECT_THROWS_WITH(fails("error_feedback=yes, reduction=int8"), "error_feedback takes no value");
  EXPECT_THROWS_WITH(fails("gather=int8, error_feedback"), "error_feedback is for a quantized reduction");
  EXPECT_THROWS_WITH(fails("reduction=int8, rank=2"), "rank is for reduction=power-sgd");
  EXPECT_THROWS_WITH(fails("gather=int8, block=3"), "blocks of 3 numbers");
  EXPECT_THROWS_WITH(fails("gather=int8, smallest=-3"), "smallest is -3, but must be a number that is not negative");
  EXPECT_THROWS_WITH(
      with(R"("tessera": {"communication": "gather=int8"}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true})"),
      "tessera.communication and zero_quantized_weights are both given");
}

TEST(Config, AStrategyHasAStage) {
  const auto config = with(R"("tessera": {"strategy": "zero-2"}, "fp16": {"enabled": true},
                              "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "allgather_bucket_size": 1e8})",
                           {.ranks = 2});
  EXPECT_EQ(config.sharding.strategy, Strategy::kZero2);
  EXPECT_EQ(config.trainer.scaler.hysteresis, 2);
  EXPECT_THROWS_WITH(with(R"("tessera": {"strategy": "full"}, "zero_optimization": {"allgather_bucket_size": 1e8})"),
                     "allgather_bucket_size is an option of the stages 1 to 2, but tessera.strategy is full");
}

TEST(Config, ProposesBatchesThatDivide) {
  const auto batch = [](const std::string& keys, int64_t ranks) {
    return TrainConfig::parse("{" + keys + "}", {.ranks = ranks}, "ds.json").batch;
  };
  EXPECT_EQ(batch(R"("train_batch_size": 32, "gradient_accumulation_steps": 2)", 4).micro, 4);
  EXPECT_EQ(batch(R"("train_batch_size": 32)", 4).micro, 8);
  EXPECT_EQ(TrainConfig::parse("{}", {.ranks = 2, .micro_batch_size = 4, .accumulation_steps = 3}).batch.train, 24);
  EXPECT_THROWS_WITH(batch(R"("train_batch_size": 10, "train_micro_batch_size_per_gpu": 4)", 1),
                     "ds.json: the batch does not divide: train_batch_size is 10, but train_micro_batch_size_per_gpu (4) × "
                     "gradient_accumulation_steps (not given) × 1 data-parallel ranks do not make it. What fits with the other "
                     "numbers:\n  train_batch_size: 8 or 12\n  train_micro_batch_size_per_gpu: 1, 2 or 5");
  EXPECT_THROWS_WITH(batch(R"("train_batch_size": 60, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2)", 3),
                     "\n  train_batch_size: 30\n  train_micro_batch_size_per_gpu: 10\n  gradient_accumulation_steps: 4");
  EXPECT_THROWS_WITH(batch(R"("train_batch_size": 7)", 8), "\n  train_batch_size: 8");
  EXPECT_THROWS_WITH(batch(R"("train_batch_size": 0)", 1), "train_batch_size is 0, but must be positive");
  EXPECT_THROWS_WITH(batch(R"("gradient_accumulation_steps": 2)", 1), "ds.json: the batch is not given");
  EXPECT_THROWS_WITH(batch(R"("train_micro_batch_size_per_gpu": 4e18, "gradient_accumulation_steps": 4)", 8),
                     "more rows than can be counted");
  EXPECT_EQ(batch(R"("train_micro_batch_size_per_gpu": 3, "tensor_parallel": {"autotp_size": 4})", 8).train, 6)
      << "two data-parallel ranks";
}

TEST(Config, MakesTheOptimizersOfDeepSpeed) {
  const auto made = [](const std::string& block) { return with("\"optimizer\": " + block).optimizer; };
  EXPECT_EQ(std::get<torch::optim::AdamWOptions>(made(R"({"type": "Adam"})")).weight_decay(), 0)
      << "Adam is AdamW, without decay";
  EXPECT_EQ(std::get<torch::optim::AdamWOptions>(made(R"({"type": "AdamW", "params": {"torch_adam": true}})")).weight_decay(),
            0.01);
  EXPECT_EQ(std::get<torch::optim::AdamOptions>(made(R"({"type": "Adam", "params": {"adam_w_mode": false}})")).lr(), 1e-3);
  EXPECT_EQ(std::get<LionOptions>(made(R"({"type": "lion"})")).betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(std::get<LambOptions>(made(R"({"type": "Lamb", "params": {"max_coeff": 0.3}})")).max_coeff(), 0.3);
  EXPECT_EQ(std::get<torch::optim::SGDOptions>(made(R"({"type": "SGD", "params": {"momentum": 0.9}})")).momentum(), 0.9);
  EXPECT_EQ(std::get<torch::optim::AdagradOptions>(made(R"({"type": "Adagrad"})")).lr(), 1e-2);
  EXPECT_EQ(std::get<OneBitAdamOptions>(made(R"({"type": "OneBitAdam", "params": {"freeze_step": 100}})")).freeze_step(), 100);
  EXPECT_EQ(std::get<OneBitLambOptions>(made(R"({"type": "OneBitLamb", "params": {"factor_max": 3}})")).factor_max(), 3);
  EXPECT_EQ(std::get<ZeroOneAdamOptions>(made(R"({"type": "ZeroOneAdam", "params": {"lr": 0.1}})")).local_step_clipper(), 16);
  const auto muon = std::get<MuonConfig>(made(R"({"type": "Muon", "params": {"lr": 0.1, "adam_lr": 0.01}})"));
  EXPECT_EQ(muon.muon.lr(), 0.1);
  EXPECT_EQ(muon.adamw.lr(), 0.01);
  EXPECT_THROWS_WITH(made(R"({"type": "Adam", "params": {"betas": [0.9]}})"),
                     "optimizer.params.betas has 1 numbers, but must have 2");
}

TEST(Config, OptimizersStepWhatIsTrained) {
  torch::nn::Sequential model(torch::nn::Embedding(7, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 7));
  model->parameters()[3].requires_grad_(false);
  for (const auto* type : {"Adam", "AdamW", "SGD", "Adagrad", "Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam",
                           "Adafactor", "AdamW8bit"}) {
    SCOPED_TRACE(type);
    const auto config = with(std::string("\"optimizer\": {\"type\": \"") + type + "\", \"params\": {\"lr\": 0.1}}");
    const auto optimizer = config.make_optimizer(*model);
    size_t parameters = 0;
    for (const auto& group : optimizer->param_groups()) {
      parameters += group.params().size();
      EXPECT_EQ(group.options().get_lr(), 0.1);
    }
    EXPECT_EQ(parameters, 4) << "of five, one is frozen";
    const auto before = model->parameters()[1].clone();
    model->forward(torch::tensor({1, 2, 3})).square().sum().backward();
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_FALSE(torch::equal(before, model->parameters()[1]));
    EXPECT_THROWS_WITH(config.check_no_optimizer(), "two optimizers, one of the program and one in ds.json");
  }
  EXPECT_THROWS_WITH(with(R"("optimizer": {"type": "Muon"})").make_optimizer(model->parameters()),
                     "ds.json: Muon needs the model");
}

TEST(Config, MakesSchedules) {
  torch::optim::SGD optimizer({torch::zeros({1})}, 0.5);
  const auto first_lr = [&](const std::string& keys) {
    optimizer.param_groups()[0].options().set_lr(0.5);
    const auto schedule = with(keys).make_schedule(optimizer);
    for (int64_t i = 0; i < 3; ++i) schedule->step();
    return optimizer.param_groups()[0].options().get_lr();
  };
  EXPECT_EQ(first_lr(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}})"), 0.25);
  EXPECT_EQ(first_lr(R"("tessera": {"schedule": {"type": "linear", "warmup_steps": 6}, "stop_after": "12 steps"})"), 0.25);
  EXPECT_EQ(first_lr(R"("tessera": {"schedule": {"type": "wsd", "decay_steps": 2, "total_steps": 4}})"), 0.25);
  EXPECT_EQ(first_lr(R"("tessera": {"schedule": {"type": "cosine", "total_steps": 6}})"), 0.25);
  EXPECT_EQ(with(R"("gradient_clipping": 0)").make_schedule(optimizer), nullptr);
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0, "total_num_steps": 9}})"),
                     "scheduler.params.warmup_num_steps is 0, but must be positive");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}})"),
                     "scheduler.params.warmup_num_steps is 1000, more than total_num_steps, 9");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupCosineLR"})"), "scheduler.params.total_num_steps is not given");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupLR"}, "tessera": {"schedule": {"type": "linear", "total_steps": 4}})"),
                     "scheduler and tessera.schedule are both given");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 4}})"),
                     "is no parameter of WarmupLR");
  EXPECT_THROWS_WITH(with(R"("scheduler": {"type": "WarmupLR"})").check_no_schedule(), "two schedules");
}

TEST(Config, HasTheLossScaleOfFp16) {
  const auto scaler = with(R"("fp16": {"enabled": true, "hysteresis": 3}, "zero_optimization": {"stage": 1})").trainer.scaler;
  EXPECT_EQ(scaler.init_scale, 65536);
  EXPECT_EQ(scaler.growth_interval, 1000);
  EXPECT_EQ(scaler.hysteresis, 3);
  EXPECT_EQ(scaler.rule, ScaleRule::kDeepSpeed);
  const auto fixed = with(R"("fp16": {"enabled": true, "loss_scale": 128})").trainer.scaler;
  EXPECT_EQ(fixed.init_scale, 128);
  EXPECT_EQ(fixed.rule, ScaleRule::kFixed);
  EXPECT_THROWS_WITH(with(R"("fp16": {"enabled": true, "loss_scale": -1})"), "fp16.loss_scale is -1");
  EXPECT_THROWS_WITH(with(R"("fp16": {"enabled": true, "loss_scale_window": 0})"), "fp16.loss_scale_window is 0");
  EXPECT_THROWS_WITH(with(R"("fp16": {"enabled": true, "initial_scale_power": 200})"), "fp16.initial_scale_power is 200");
  EXPECT_THROWS_WITH(with(R"("fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 8})"),
                     "fp16.min_loss_scale is 8");
  EXPECT_THROWS_WITH(with(R"("fp16": {"enabled": true}, "bf16": {"enabled": true})"),
                     "fp16.enabled and bf16.enabled are both true");
}

TEST(Config, NamesPrecisions) {
  const auto precision = [](const std::string& keys) { return with(keys).precision; };
  EXPECT_EQ(precision(R"("steps_per_print": 1)").name, "fp32");
  EXPECT_EQ(precision(R"("tessera": {"precision": "bf16_mixed"})").policy.reduce_dtype, torch::kFloat);
  EXPECT_EQ(precision(R"("tessera": {"precision": "bf16_full"})").parameters, torch::kBFloat16);
  EXPECT_EQ(precision(R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})").policy.reduce_dtype,
            torch::kFloat);
  EXPECT_EQ(precision(R"("bf16": {"enabled": true}, "tessera": {"keep_in_fp32": "norm"})").policy.keep_in_fp32,
            std::vector<std::string>{"norm"});
  EXPECT_EQ(precision(R"("zero_optimization": {"stage": 1},
                         "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true})")
                .name,
            "bf16_full");
  EXPECT_THROWS_WITH(precision(R"("fp16": {"enabled": true}, "tessera": {"precision": "bf16_mixed"})"),
                     "tessera.precision is bf16_mixed, but fp16");
  EXPECT_THROWS_WITH(precision(R"("tessera": {"precision": "bf16_mix"})"), "did you mean \"bf16_mixed\"?");
  EXPECT_THROWS_WITH(precision(R"("data_types": {"param_dtype": "bf16"})"), "data_types.param_dtype is bf16, but");
  EXPECT_THROWS_WITH(precision(R"("data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16")"),
                     "gradients wait in the dtype in which they are sent");
}

using Mesh = std::vector<std::pair<std::string, int64_t>>;

TEST(Config, ArrangesTheRanks) {
  EXPECT_EQ(with_zero(R"("stage": 3)").sharding.mesh, (Mesh{{"shard", 8}}));
  EXPECT_EQ(with_zero(R"("stage": 0)").sharding.mesh, (Mesh{{"replicate", 8}}));
  EXPECT_EQ(with_zero(R"("stage": 3)", 1).sharding.mesh, (Mesh{{"shard", 1}}));
  const auto mics = with_zero(R"("stage": 3, "mics_shard_size": 4)").sharding;
  EXPECT_EQ(mics.mesh, (Mesh{{"replicate", 2}, {"shard", 4}}));
  EXPECT_EQ(mics.strategy, Strategy::kHybridShard);
  EXPECT_EQ(with_zero(R"("stage": 3, "zero_hpz_partition_size": 2)").sharding.reshard_after_forward, ReshardAfterForward(2));
  EXPECT_EQ(with(R"("zero_optimization": true)", {.ranks = 2}).sharding.strategy, Strategy::kZero1);
  const auto grid =
      with(R"("tessera": {"mesh": {"tp": 2, "pp": 2, "replicate": 2}, "strategy": "hierarchical"})", {.ranks = 16}).sharding;
  EXPECT_EQ(grid.mesh, (Mesh{{"pp", 2}, {"replicate", 2}, {"shard", 2}, {"tp", 2}}));
  EXPECT_EQ(grid.strategy, Strategy::kHierarchical);
  EXPECT_EQ(with(R"("tessera": {"mesh": {"tp": 2}}, "zero_optimization": {"stage": 3})", {.ranks = 2}).sharding.mesh,
            (Mesh{{"shard", 1}, {"tp", 2}}));
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "mics_shard_size": 3)"),
                     "mics_shard_size is 3, which does not divide the 8 ranks that shard");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "zero_hpz_partition_size": 3)"),
                     "zero_hpz_partition_size is 3, which does not divide");
  EXPECT_THROWS_WITH(with(R"("tessera": {"mesh": {"tp": 3}})", {.ranks = 8}),
                     "tessera.mesh (tp 3) does not make the 8 ranks of the job");
  EXPECT_THROWS_WITH(with(R"("tessera": {"mesh": {"shard": 4}})", {.ranks = 8}),
                     "tessera.mesh (shard 4) does not make the 8 ranks");
  EXPECT_THROWS_WITH(with(R"("tessera": {"mesh": {"shard": -1, "cp": -1}})", {.ranks = 8}),
                     "two dims of tessera.mesh are -1, shard and cp");
  EXPECT_THROWS_WITH(with(R"("tessera": {"mesh": {"dp": 2}})", {.ranks = 8}), "the key tessera.mesh.dp is unknown");
  EXPECT_THROWS_WITH(with(R"("tessera": {"strategy": "zero-2"}, "zero_optimization": {"stage": 3})"),
                     "tessera.strategy is zero-2, which is stage 2, but zero_optimization.stage is 3");
  EXPECT_THROWS_WITH(with(R"("tessera": {"strategy": "hybrid"})", {.ranks = 8}), "which needs dims replicate and shard");
}

TEST(Config, Offloads) {
  EXPECT_EQ(
      with_zero(
          R"("stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"})")
          .sharding.offload,
      offload_to_files("/tmp"));
  const auto states = with_zero(R"("stage": 2, "cpu_offload": true)");
  EXPECT_EQ(states.sharding.offload, offload_to_host());
  EXPECT_THAT(states.notes, Contains(HasSubstr("shards, reduced gradients and optimizer states alike")));
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "offload_param": {"device": "nvme"})"), "offload_param.nvme_path is not given");
  EXPECT_THROWS_WITH(
      with_zero(
          R"("stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"})"),
      "offload_param.device is cpu and that of offload_optimizer is nvme: here they lie in one place");
  EXPECT_THROWS_WITH(with_zero(R"("stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"),
                     "offload_optimizer.ratio is 0.5, which is not here");
}

TEST(Config, HasABlockOfItsOwn) {
  const auto config = with(R"("tensorboard": {"enabled": true, "output_path": "runs/", "job_name": "a"}, "tessera": {
    "stop_after": ["20000 steps", "90 min"], "save": {"folder": "run", "every": ["500 steps", "1.5 h"], "keep": 3, "best": "valid"},
    "evaluate": {"every": "500 steps"}, "log": {"jsonl": "log.jsonl", "every": 10, "progress": false},
    "early_stop": {"metric": "valid", "patience": 10, "better": "larger"}, "seed": 7, "recompute": true, "non_finite": "skip",
    "reshard_after_forward": false, "layout": "per-parameter", "initial_weights": "broadcast",
    "plan": {"blocks.*.up": "colwise", "blocks.*.qkv": "colwise packed 3", "blocks.*.down": "rowwise"}, "profile": {"folder": "p", "steps": 2}})");
  const auto& trainer = config.trainer;
  EXPECT_EQ(trainer.stop_after.steps, 20000);
  EXPECT_EQ(trainer.stop_after.run_time, std::chrono::minutes(90));
  EXPECT_EQ(trainer.save.every.steps, 500);
  EXPECT_EQ(trainer.save.every.time, std::chrono::minutes(90));
  EXPECT_EQ(trainer.save.best, "valid");
  EXPECT_EQ(trainer.log.tensorboard, "runs/a");
  EXPECT_EQ(trainer.log.every, 10);
  EXPECT_FALSE(trainer.log.progress);
  EXPECT_EQ(trainer.early_stop->patience, 10);
  EXPECT_EQ(trainer.early_stop->better, Better::kLarger);
  EXPECT_EQ(trainer.profile.steps, 2);
  EXPECT_EQ(trainer.save.resume, Resume::kIfThere);
  EXPECT_EQ(trainer.seed, 7);
  EXPECT_EQ(trainer.non_finite, NonFinite::kSkip);
  EXPECT_TRUE(config.sharding.recompute);
  EXPECT_EQ(config.shard_options().reshard_after_forward, ReshardAfterForward(false));
  EXPECT_EQ(config.shard_options().layout, BufferLayout::kPerParameter);
  EXPECT_EQ(
      to_string(*config.sharding.plan),
      to_string(ParallelPlan{{"blocks.*.down", Rowwise{}}, {"blocks.*.qkv", Colwise{.packed = 3}}, {"blocks.*.up", Colwise{}}}));
}

TEST(Config, HasABlockOfTheProgram) {
  const auto config = with(R"("tessera": {"model": {"layers": 4, "width": 2e2, "name": "gpt", "tied": true, "sizes": [1, 2]}})");
  int64_t layers = 1, width = 1, heads = 5;
  std::string name;
  bool tied = false;
  std::vector<int64_t> sizes;
  auto own = config.own("model");
  own.read("layers", layers).read("width", width).read("name", name).read("tied", tied).read("heads", heads);
  EXPECT_EQ(layers * width, 800);
  EXPECT_EQ(heads, 5);
  EXPECT_TRUE(tied);
  EXPECT_THROWS_WITH(own.check_all_read(), "ds.json: tessera.model: the program knows no key sizes");
  own.read("sizes", sizes).check_all_read();
  EXPECT_THAT(sizes, ElementsAre(1, 2));
  EXPECT_THROWS_WITH(own.read("name", layers), "ds.json: tessera.model.name is \"gpt\", but must be of the type integer");
  EXPECT_THROWS_WITH(config.own("mode"), "no block tessera.mode");
  struct Sizes {
    int64_t layers = 1;
    void read(OwnSettings& settings) { settings.read("layers", layers); }
  };
  EXPECT_EQ(with(R"("tessera": {"model": {"layers": 4}})").own<Sizes>("model").layers, 4);
  EXPECT_EQ(with(R"("steps_per_print": 1)").own<Sizes>("model").layers, 1);
  EXPECT_THROWS_WITH(config.own<Sizes>("model"), "the program knows no key name");
}

TEST(Config, RefusesWrongValuesOfItsOwnBlock) {
  const auto tessera = [](const std::string& keys) { return with("\"tessera\": {" + keys + "}"); };
  EXPECT_THROWS_WITH(tessera(R"("stop_after": "soon")"),
                     "tessera.stop_after is \"soon\", but must be a positive number and a unit");
  EXPECT_THROWS_WITH(tessera(R"("stop_after": "5 stpes")"), "whose unit is unknown; did you mean \"steps\"?");
  EXPECT_THROWS_WITH(tessera(R"("stop_after": ["5 steps", "6 steps"])"), "has \"6 steps\" beside another one of that kind");
  EXPECT_THROWS_WITH(tessera(R"("stop_after": "0 steps")"), "must be a positive number");
  EXPECT_THROWS_WITH(tessera(R"("stop_after": "1.5 steps")"), "is no whole number");
  EXPECT_THROWS_WITH(tessera(R"("evaluate": {"every": "1 epoch"})"), "tessera.evaluate.every counts epochs");
  EXPECT_THROWS_WITH(tessera(R"("save": {"every": "5 steps"})"), "tessera.save.folder is not given");
  EXPECT_THROWS_WITH(tessera(R"("save": {"folder": "a", "keep": 1})"), "tessera.save.keep is 1");
  EXPECT_THROWS_WITH(tessera(R"("early_stop": {"patience": 1})"), "tessera.early_stop.metric is not given");
  EXPECT_THROWS_WITH(tessera(R"("plan": {"a": "colwize"})"), "tessera.plan.a is \"colwize\"");
  EXPECT_THROWS_WITH(tessera(R"("overlap": "always")"),
                     "tessera.overlap is always, which needs split sequences, but tessera.sequence_parallel is false");
  EXPECT_THROWS_WITH(tessera(R"("sequence_parallel": true, "plan": {"a": "sequence"})"),
                     "ds.json: tessera.sequence_parallel is true beside tessera.plan, which says by itself what is split");
  EXPECT_FALSE(tessera(R"("sequence_parallel": false, "plan": {"a": "sequence"})").sharding.sequence_parallel);
  EXPECT_THROWS_WITH(tessera(R"("overlap": true)"), "tessera.overlap is true, but must be one of never, always, measured");
  EXPECT_THROWS_WITH(tessera(R"("overlap": "measured", "plan": {"a": "colwise"})"),
                     "tessera.overlap is measured, which needs split sequences, but no style of tessera.plan is sequence");
  EXPECT_THROWS_WITH(tessera(R"("overlap": "sometimes", "sequence_parallel": true)"),
                     "tessera.overlap is \"sometimes\", but must be one of never, always, measured");
  EXPECT_EQ(tessera(R"("overlap": "always", "plan": {"a": "sequence"})").sharding.overlap, Overlap::kAlways);
  EXPECT_THROWS_WITH(tessera(R"("model": 3)"), "tessera.model is 3, but must be a block");
  EXPECT_THROWS_WITH(tessera(R"("reshard_after_forward": "yes")"), "must be true, false or a number of ranks");
}

TEST(Config, IsSavedAndCompared) {
  const auto config =
      with(R"("gradient_clipping": "auto", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": true},
                              "zero_optimization": {"stage": 2, "overlap_comm": true}, "tessera": {"model": {"layers": 2}})",
           {.ranks = 4, .max_grad_norm = 0.5});
  const auto again = TrainConfig::parse(config.resolved(), {.ranks = 4});
  EXPECT_EQ(again.resolved(), config.resolved());
  EXPECT_EQ(again.trainer.max_grad_norm, 0.5);
  EXPECT_THAT(differences(config.resolved(), again), ElementsAre());
  const auto other = with(
      R"("optimizer": {"type": "SGD", "params": {"lr": 0.2}}, "zero_optimization": {"stage": 3}, "tessera": {"model": {"layers": 3}})",
      {.ranks = 4});
  EXPECT_THAT(differences(config.resolved(), other),
              ElementsAre("bf16.enabled: saved true, here false", "gradient_clipping: saved 0.5, here 1.0",
                          "optimizer.params.lr: saved 0.1, here 0.2", "tessera.model: saved {\"layers\":2}, here {\"layers\":3}",
                          "zero_optimization.stage: saved 2, here 3"));
}

TEST(Config, TellsWhereEachValueIsFrom) {
  const auto lines = with(R"("gradient_clipping": "auto")", {.ranks = 2, .max_grad_norm = 0.5}).lines();
  const auto line = [&](const std::string& key) {
    for (const auto& each : lines) {
      if (each.key == key) return each.value + " from " + each.origin;
    }
    return std::string("none");
  };
  EXPECT_EQ(line("gradient_clipping"), "0.5 from auto: max_grad_norm");
  EXPECT_EQ(line("train_batch_size"), "8 from computed");
  EXPECT_EQ(line("train_micro_batch_size_per_gpu"), "4 from file");
  EXPECT_EQ(line("optimizer.params.lr"), "none");
}

std::string page(const std::string& name) {
  std::stringstream content;
  content << std::ifstream(TESSERA_DOCS "/" + name).rdbuf();
  return content.str();
}

/// The pages show configs that can be read.
TEST(Config, DocsShowConfigsThatAreRead) {
  size_t configs = 0;
  for (const std::string name : {"../README.md", "from_deepspeed.md", "from_accelerate.md", "training.md"}) {
    const auto text = page(name), start = std::string("```json\n");
    for (auto at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
      const auto begin = at + start.size();
      const auto block = text.substr(begin, text.find("```", begin) - begin);
      if (block.find("batch_size") == std::string::npos) continue;
      SCOPED_TRACE(name + ": " + block);
      EXPECT_GT(TrainConfig::parse(block, {.ranks = 8}).batch.train, 0);
      ++configs;
    }
  }
  EXPECT_GE(configs, 1);
}

/// Changes a text at random places.
std::string damaged(std::string text, Draw& draw) {
  for (int64_t changes = 1 + draw.below(3); changes > 0 && !text.empty(); --changes) {
    const auto at = static_cast<size_t>(draw.below(static_cast<int64_t>(text.size())));
    const std::string characters = "{}[],:\"'/*#\\\n0e-.xt\xff";
    switch (draw.below(3)) {
      case 0: text.erase(at, static_cast<size_t>(1 + draw.below(9))); break;
      case 1: text.insert(at, 1, characters[static_cast<size_t>(draw.below(static_cast<int64_t>(characters.size())))]); break;
      default: text[at] = characters[static_cast<size_t>(draw.below(static_cast<int64_t>(characters.size())))];
    }
  }
  return text;
}

TEST(Config, DamagedFilesAreErrorsThatNameThem) {
  Draw draw(test_seed());
  int64_t refused = 0;
  for (int64_t i = 0; i < 3000; ++i) {
    const auto text = damaged(i % 2 == 0 ? kStage2 : kStage3, draw);
    try {
      TrainConfig::parse(text, {.ranks = 4}, "ds.json");
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), ::testing::StartsWith("ds.json: ")) << text;
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

/// The pages show the tables of the code.
TEST(Config, DocsHaveEachKey) {
  EXPECT_THAT(page("from_deepspeed.md"), HasSubstr(internal::markdown_table(internal::deepspeed_keys())));
  EXPECT_THAT(page("from_deepspeed.md"), HasSubstr(internal::markdown_table(internal::tessera_keys())));
  EXPECT_THAT(page("from_accelerate.md"), HasSubstr(internal::markdown_table(internal::accelerate_keys())));
}

TEST(Config, DefaultsAreOfTheirTypes) {
  for (const auto keys : {internal::deepspeed_keys(), internal::tessera_keys(), internal::accelerate_keys()}) {
    for (const auto& key : keys) {
      SCOPED_TRACE(key.name);
      EXPECT_FALSE(key.here.empty());
      if (key.name.find('.') != std::string_view::npos)
        EXPECT_NE(internal::find_key(keys, key.name.substr(0, key.name.rfind('.'))), nullptr) << "the block has a row";
      EXPECT_EQ(internal::find_key(keys, key.name), &key) << "a key has one row";
    }
  }
}

} // namespace
} // namespace tessera::testing::config_test
