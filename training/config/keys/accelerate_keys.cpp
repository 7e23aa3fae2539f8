// The keys of the YAML that `accelerate config` writes. The blocks' keys have their block's prefix, which may be left out here.
#include <tessera/training/config/keys/config_key.h>

namespace tessera::internal {

namespace {

using enum KeyType;
using enum KeyEffect;

constexpr ConfigKey kAccelerateKeys[] = {
    {"compute_environment", kText, "\"LOCAL_MACHINE\"", kMissing, "jobs start by torchrun, Slurm, MPI or `launch`"},
    {"distributed_type", kText, "", kUsed, "FSDP, DEEPSPEED, or replicas: NO, MULTI_GPU, MULTI_CPU"},
    {"mixed_precision", kAny, "\"no\"", kUsed, "no, bf16: `tessera.precision` bf16_mixed, fp16; not fp8"},
    {"num_processes", kInteger, "null", kUsed, "must be the ranks of `parallelism_config`; torchrun starts them"},
    {"num_machines", kInteger, "1", kUsed, "replicas of HYBRID_SHARD; torchrun --nnodes starts them"},
    {"machine_rank", kInteger, "0", kNone, "torchrun --node-rank"},
    {"main_process_ip", kText, "null", kNone, "torchrun --master-addr"},
    {"main_process_port", kInteger, "null", kNone, "torchrun --master-port"},
    {"rdzv_backend", kText, "\"static\"", kNone, "torchrun --rdzv-backend"},
    {"same_network", kBoolean, "false", kNone, "the launcher's"},
    {"main_training_function", kText, "\"main\"", kNone, "a C++ program has one main"},
    {"gpu_ids", kAny, "null", kNone, "CUDA_VISIBLE_DEVICES"},
    {"use_cpu", kBoolean, "false", kNone, "the program's mesh says it"},
    {"debug", kBoolean, "false", kNone, "collectives are compared in any case"},
    {"enable_cpu_affinity", kBoolean, "false", kNone, "the launcher's"},
    {"mpirun_config", kAny, "", kNone, "mpirun starts the program itself"},
    {"commands", kAny, "", kNone, "the launcher's"},
    {"command_file", kAny, "", kNone, "the launcher's"},
    {"downcast_bf16", kAny, "false", kNone, "it is for TPUs"},
    {"tpu_name", kAny, "", kNone, "it is for TPUs"},
    {"tpu_zone", kAny, "", kNone, "it is for TPUs"},
    {"tpu_env", kAny, "", kNone, "it is for TPUs"},
    {"tpu_vm", kAny, "", kNone, "it is for TPUs"},
    {"tpu_use_cluster", kBoolean, "false", kMissing, "there are no TPUs"},
    {"tpu_use_sudo", kBoolean, "false", kNone, "it is for TPUs"},
    {"ipex_config", kAny, "", kNone, "LibTorch's kernels are used"},
    {"dynamo_backend", kText, "\"NO\"", kMissing, "models are compiled C++"},
    {"dynamo_config", kAny, "", kMissing, "models are compiled C++"},
    {"megatron_lm_config", kAny, "", kMissing, "dims are `parallelism_config`"},
    {"fp8_config", kAny, "", kMissing, "call convert_to_float8 in the program"},
    {"fp16", kBoolean, "false", kUsed, "the old name of `mixed_precision`: fp16"},
    // FSDP
    {"fsdp_config", kBlock, "", kUsed, "of `distributed_type` FSDP"},
    {"fsdp_config.fsdp_version", kInteger, "1", kUsed, "says how `fsdp_reshard_after_forward` is meant"},
    {"fsdp_config.fsdp_sharding_strategy", kAny, "null", kUsed,
     "FULL_SHARD, SHARD_GRAD_OP (gathered from forward to backward), NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or 1 to 5"},
    {"fsdp_config.fsdp_reshard_after_forward", kAny, "null", kUsed, "true or false; in version 1 the name of a strategy"},
    {"fsdp_config.fsdp_offload_params", kBoolean, "false", kUsed, "shards, gradients and states on the host"},
    {"fsdp_config.fsdp_activation_checkpointing", kBoolean, "false", kUsed, "`tessera.recompute`"},
    {"fsdp_config.fsdp_cpu_ram_efficient_loading", kBoolean, "false", kUsed, "`tessera.initial_weights`: broadcast"},
    {"fsdp_config.fsdp_sync_module_states", kBoolean, "false", kUsed, "`tessera.initial_weights`: broadcast"},
    {"fsdp_config.fsdp_auto_wrap_policy", kText, "null", kNone, "the program says which modules are groups"},
    {"fsdp_config.fsdp_transformer_layer_cls_to_wrap", kAny, "", kNone, "the program says which modules are groups"},
    {"fsdp_config.fsdp_min_num_params", kNumber, "null", kNone, "the program says which modules are groups"},
    {"fsdp_config.fsdp_state_dict_type", kText, "null", kNone, "each rank saves its part; exports are whole"},
    {"fsdp_config.fsdp_backward_prefetch", kText, "null", kNone, "the next group is gathered ahead"},
    {"fsdp_config.fsdp_forward_prefetch", kBoolean, "false", kNone, "the next group is gathered ahead"},
    {"fsdp_config.fsdp_use_orig_params", kBoolean, "false", kNone, "parameters stay the program's"},
    {"fsdp_config.fsdp_limit_all_gathers", kBoolean, "true", kNone, "one group is gathered ahead"},
    {"fsdp_config.fsdp_ignored_modules", kAny, "null", kMissing, "`FullyShardOptions::ignored_params`, in the program"},
    // ParallelismConfig
    {"parallelism_config", kBlock, "", kUsed, "`tessera.mesh`"},
    {"parallelism_config.parallelism_config_dp_replicate_size", kInteger, "1", kUsed, "`tessera.mesh.replicate`"},
    {"parallelism_config.parallelism_config_dp_shard_size", kInteger, "1", kUsed, "`tessera.mesh.shard`"},
    {"parallelism_config.parallelism_config_cp_size", kInteger, "1", kUsed, "`tessera.mesh.cp`"},
    {"parallelism_config.parallelism_config_tp_size", kInteger, "1", kUsed, "`tessera.mesh.tp`"},
    {"parallelism_config.parallelism_config_sp_size", kInteger, "1", kMissing, "sequences are split by cp"},
    {"parallelism_config.parallelism_config_cp_backend", kText, "\"torch\"", kNone, "the program's attention says it"},
    {"parallelism_config.parallelism_config_cp_comm_strategy", kText, "null", kNone, "the program's attention says it"},
    {"parallelism_config.parallelism_config_sp_backend", kText, "null", kNone, "sequences are split by cp"},
    // DeepSpeed without a JSON file
    {"deepspeed_config", kBlock, "", kUsed, "of `distributed_type` DEEPSPEED"},
    {"deepspeed_config.deepspeed_config_file", kText, "null", kMissing, "give that file to the program, as it is"},
    {"deepspeed_config.zero_stage", kInteger, "2", kUsed, "`zero_optimization.stage`"},
    {"deepspeed_config.gradient_accumulation_steps", kAny, "\"auto\"", kUsed, "`gradient_accumulation_steps`"},
    {"deepspeed_config.gradient_clipping", kAny, "\"auto\"", kUsed, "`gradient_clipping`"},
    {"deepspeed_config.offload_optimizer_device", kText, "\"none\"", kUsed, "`zero_optimization.offload_optimizer.device`"},
    {"deepspeed_config.offload_param_device", kText, "\"none\"", kUsed, "`zero_optimization.offload_param.device`"},
    {"deepspeed_config.offload_optimizer_nvme_path", kText, "\"none\"", kUsed, "`zero_optimization.offload_optimizer.nvme_path`"},
    {"deepspeed_config.offload_param_nvme_path", kText, "\"none\"", kUsed, "`zero_optimization.offload_param.nvme_path`"},
    {"deepspeed_config.zero3_init_flag", kBoolean, "false", kNone,
     "`on_meta` and `materialize` build a model without its memory"},
    {"deepspeed_config.zero3_save_16bit_model", kBoolean, "false", kNone, "`save_hugging_face` writes whole tensors"},
    {"deepspeed_config.deepspeed_hostfile", kText, "null", kNone, "the launcher's"},
    {"deepspeed_config.deepspeed_multinode_launcher", kText, "null", kNone, "the launcher's"},
    {"deepspeed_config.deepspeed_exclusion_filter", kText, "null", kNone, "the launcher's"},
    {"deepspeed_config.deepspeed_inclusion_filter", kText, "null", kNone, "the launcher's"},
    {"deepspeed_config.deepspeed_moe_layer_cls_names", kText, "null", kNone, "the program says which modules are groups"},
};

} // namespace

std::span<const ConfigKey> accelerate_keys() { return kAccelerateKeys; }

} // namespace tessera::internal
