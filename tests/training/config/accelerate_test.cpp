#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <tessera/tests/support/matchers.h>
#include <tessera/training/train_config.h>

namespace tessera::testing::accelerate_test {
namespace {

using tessera::Strategy; // beside that of the tests
using ::testing::Contains;
using ::testing::HasSubstr;

struct Converted {
  TrainConfig config;
  std::vector<std::string> notes;
};

/// What the YAML is in the end, read with a micro-batch of 2 on so many ranks.
Converted convert(const std::string& yaml_as_json, int64_t ranks = 8, std::optional<double> max_grad_norm = std::nullopt) {
  std::vector<std::string> notes;
  const auto text = config_from_accelerate(yaml_as_json, "a.yaml", notes);
  return {TrainConfig::parse(text, {.ranks = ranks, .micro_batch_size = 2, .max_grad_norm = max_grad_norm}, "a.json"), notes};
}

TrainConfig fsdp(const std::string& keys, const std::string& top = "") {
  return convert(R"({"distributed_type": "FSDP", )" + top + R"("fsdp_config": {)" + keys + "}}").config;
}

using Mesh = std::vector<std::pair<std::string, int64_t>>;

TEST(Accelerate, ConvertsFsdp) {
  const auto result = convert(R"({"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "machine_rank": 1,
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "fsdp_cpu_ram_efficient_loading": true, "fsdp_activation_checkpointing": true, "fsdp_offload_params": false}})");
  const auto& config = result.config;
  EXPECT_EQ(config.sharding.strategy, Strategy::kFullShard);
  EXPECT_EQ(config.sharding.initial_weights, InitialWeights::kBroadcast);
  EXPECT_TRUE(config.sharding.recompute);
  EXPECT_EQ(config.precision.name, "bf16_mixed");
  EXPECT_EQ(config.batch.train, 16);
  EXPECT_EQ(config.trainer.max_grad_norm, 0);
  EXPECT_THAT(result.notes,
              Contains(HasSubstr("fsdp_auto_wrap_policy has no effect here: the program says which modules are groups")));
  EXPECT_THAT(result.notes, Contains("machine_rank has no effect here: torchrun --node-rank"));
}

TEST(Accelerate, KnowsTheStrategiesOfBothVersions) {
  EXPECT_EQ(fsdp(R"("fsdp_sharding_strategy": 3)").sharding.strategy, Strategy::kNoShard);
  EXPECT_EQ(fsdp(R"("fsdp_sharding_strategy": "SHARD_GRAD_OP")").sharding.reshard_after_forward, ReshardAfterForward(false));
  EXPECT_EQ(fsdp(R"("reshard_after_forward": "SHARD_GRAD_OP")").sharding.reshard_after_forward, ReshardAfterForward(false));
  EXPECT_EQ(fsdp(R"("fsdp_version": 2, "fsdp_reshard_after_forward": false)").sharding.reshard_after_forward,
            ReshardAfterForward(false));
  EXPECT_EQ(fsdp(R"("fsdp_version": 2)").sharding.strategy, Strategy::kFullShard);
  const auto hybrid = fsdp(R"("fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2")", R"("num_machines": 2, )").sharding;
  EXPECT_EQ(hybrid.strategy, Strategy::kHybridShard);
  EXPECT_EQ(hybrid.mesh, (Mesh{{"replicate", 2}, {"shard", 4}}));
  EXPECT_EQ(hybrid.reshard_after_forward, ReshardAfterForward(false));
  EXPECT_EQ(fsdp(R"("fsdp_offload_params": true)").sharding.offload, offload_to_host());
  EXPECT_THROWS_WITH(fsdp(R"("fsdp_sharding_strategy": "FULL_SHART")"), "did you mean \"FULL_SHARD\"?");
  EXPECT_THROWS_WITH(fsdp(R"("fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD")"),
                     "but must be true or false in version 2");
  EXPECT_THROWS_WITH(fsdp(R"("fsdp_version": 3)"), "a.yaml: fsdp_config.fsdp_version is 3");
  EXPECT_THROWS_WITH(fsdp(R"("fsdp_ignored_modules": "head")"), "fsdp_ignored_modules is \"head\", which is not here");
}

TEST(Accelerate, ConvertsParallelismConfigs) {
  const auto* yaml = R"({"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2},
    "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}})";
  EXPECT_EQ(convert(yaml).config.sharding.mesh, (Mesh{{"replicate", 2}, {"shard", 2}, {"tp", 2}}));
  const auto cp = convert(R"({"distributed_type": "FSDP", "parallelism_config": {"cp_size": 8}})").config;
  EXPECT_EQ(cp.sharding.mesh, (Mesh{{"shard", 1}, {"cp", 8}}));
  EXPECT_EQ(cp.batch.train, 2) << "all ranks share the rows";
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "FSDP", "num_processes": 4, "parallelism_config": {"cp_size": 8}})"),
                     "a.yaml: parallelism_config makes 8 ranks, but num_processes is 4");
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "FSDP", "parallelism_config": {"sp_size": 2}})"),
                     "sp_size is 2, which is not here");
}

TEST(Accelerate, ConvertsReplicasAndDeepSpeed) {
  const auto plain =
      convert(R"({"distributed_type": "MULTI_GPU", "mixed_precision": "no", "fsdp_config": {}, "main_process_ip": null,
                                 "dynamo_backend": "NO", "compute_environment": "LOCAL_MACHINE", "tpu_env": []})")
          .config;
  EXPECT_EQ(plain.sharding.strategy, Strategy::kNoShard);
  EXPECT_EQ(plain.precision.name, "fp32");
  const auto fp16 = convert(R"({"distributed_type": "NO", "mixed_precision": "fp16"})", 1).config.trainer.scaler;
  EXPECT_EQ(fp16.growth_interval, 2000);
  EXPECT_EQ(fp16.hysteresis, 1);
  const auto deepspeed = convert(R"({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": "auto", "offload_param_device": "cpu",
                         "offload_optimizer_device": "cpu", "zero3_init_flag": true}})",
                                 8, 1.5)
                             .config;
  EXPECT_EQ(deepspeed.precision.name, "deepspeed");
  EXPECT_EQ(deepspeed.sharding.offload, offload_to_host());
  EXPECT_EQ(deepspeed.batch.accumulation, 4);
  EXPECT_EQ(deepspeed.trainer.max_grad_norm, 1.5);
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}})"),
                     "deepspeed_config_file is \"ds.json\", which is not here: give that file to the program, as it is");
}

TEST(Accelerate, RefusesWhatItDoesNotKnow) {
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "FSDP", "mixed_precission": "bf16"})"),
                     "a.yaml: mixed_precission is an unknown key; did you mean \"mixed_precision\"?");
  EXPECT_THROWS_WITH(convert(R"({"mixed_precision": "bf16"})"), "a.yaml: distributed_type is not given");
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "MEGATRON_LM"})"), "distributed_type is MEGATRON_LM, which is not here");
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "NO", "mixed_precision": "fp8"})"),
                     "mixed_precision is fp8, which no config turns on");
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "NO", "mixed_precision": "half"})"),
                     "mixed_precision is \"half\", but must be");
  EXPECT_THROWS_WITH(convert(R"({"distributed_type": "NO", "compute_environment": "AMAZON_SAGEMAKER"})"), "is not here");
}

} // namespace
} // namespace tessera::testing::accelerate_test
