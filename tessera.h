#pragma once

/// All public headers of Tessera.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/distribute_module.h>
#include <tessera/dtensor/factories.h>
#include <tessera/dtensor/local_map.h>
#include <tessera/dtensor/register_sharding.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mixed_precision/policy.h>
#include <tessera/optim/shard_optimizer.h>
