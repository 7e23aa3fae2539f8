#pragma once

/// Ranks in dims: what torch.distributed.device_mesh is in Python.

#include <tessera/mesh/device_mesh.h>
