#pragma once

namespace tessera::testing::sim {

/// Registers the device's kernels with the dispatcher. Once in a process.
void register_operators();

} // namespace tessera::testing::sim
