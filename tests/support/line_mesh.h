#pragma once

#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// All ranks in one dim, on the device that is tested.
inline DeviceMesh line_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"shard"}); }

} // namespace tessera::testing
