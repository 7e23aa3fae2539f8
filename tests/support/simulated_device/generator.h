#pragma once

#include <ATen/core/Generator.h>

namespace tessera::testing::sim {

/// The generator of the CPU that a generator of the simulated device draws from.
at::Generator cpu_generator_of(const at::Generator& generator);
/// Draws from the CPU's default generator: a seed gives the numbers that it gives on the CPU.
const at::Generator& default_generator();
/// Draws from a generator of its own.
at::Generator make_generator();

/// Within it the default generator draws from one of its own, as that of a GPU does. Operators that name no generator go on
/// drawing from the CPU's.
class OwnNumbers {
 public:
  OwnNumbers();
  ~OwnNumbers();
  OwnNumbers(const OwnNumbers&) = delete;
  OwnNumbers& operator=(const OwnNumbers&) = delete;

 private:
  at::Generator cpu_;
};

} // namespace tessera::testing::sim
