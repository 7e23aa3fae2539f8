#pragma once

/// Tensors that are spread over a mesh: what torch.distributed.tensor is in Python.

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/distribute_module.h>
#include <tessera/dtensor/factories.h>
#include <tessera/dtensor/local_map.h>
#include <tessera/dtensor/placement.h>
#include <tessera/dtensor/register_sharding.h>
#include <tessera/dtensor/spec.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/mesh.h>
