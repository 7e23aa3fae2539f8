#pragma once

namespace tessera::testing::sim {

/// Registers autocast for the simulated device. Once.
void register_autocast();

} // namespace tessera::testing::sim
