#pragma once

/// Sharded models and their optimizers: what torch.distributed.fsdp is in Python.

#include <tessera/fsdp/call.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/micro_batch.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/options.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/shard_script.h>
#include <tessera/fsdp/step_report.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/fsdp/summary.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/fsdp/whole_parameters.h>
#include <tessera/mesh.h>
#include <tessera/mixed_precision/policy.h>
#include <tessera/nn/script_module.h>
#include <tessera/offload/offload_policy.h>
#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/register_optimizer.h>
#include <tessera/optim/shard_optimizer.h>
#include <tessera/optim/sharded_optimizer.h>
#include <tessera/optim/step.h>
