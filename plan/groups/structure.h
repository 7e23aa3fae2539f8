#pragma once

// Internal: the modules of a model that can be groups of `fully_shard`, from their structure.

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::internal {

/// Modules that are gathered together.
struct ModuleUnit {
  std::vector<std::string> paths;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  int64_t bytes = 0;     ///< of parameters, a shared one where it comes first
  bool is_block = false; ///< a part that repeats, or an element of a list
};

/// Splits `module` into units, in the order of registration: blocks as wholes (those above `budget` bytes are split further; 0:
/// none), and of all else modules without children. Parameters that a module with units below it holds itself are in none.
/// `item` is the bytes of an element, where forward reads all in one dtype; 0: each in its own.
std::vector<ModuleUnit> units_of(const torch::nn::Module& module, int64_t budget, int64_t item);

/// The units that become groups: blocks, large modules, and neighbouring small ones together, up to `budget` bytes (0: the size
/// of a block). What is small even so is left to the root.
std::vector<ModuleUnit> joined(const std::vector<ModuleUnit>& units, int64_t budget);

} // namespace tessera::internal
