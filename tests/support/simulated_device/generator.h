#pragma once

#include <ATen/core/Generator.h>

namespace tessera::testing::sim {

/// The generator of the CPU that a generator of the simulated device draws from.
at::Generator cpu_generator_of(const at::Generator& generator);
/// Draws from the CPU's default generator: a seed gives the numbers that it gives on the CPU.
const at::Generator& default_generator();
/// Draws from a generator of its own.
at::Generator make_generator();

} // namespace tessera::testing::sim
