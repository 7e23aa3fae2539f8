#pragma once

// Internal: how the style of a module places its parameters.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/tensor/plan_lines.h>
#include <tessera/parallel/tensor/style.h>

namespace tessera::internal::parallel {

/// A parameter with the name of the module that has it, and what a line of a plan wants of it.
struct PlacedParameter {
  std::string name;
  at::Tensor tensor;
  Placement placement = Replicate{};
  bool may_be_uneven = false; ///< the ranks need not divide what it splits
  Style style = {};
};

/// The module's own parameters under `style`. An error where the style does not fit the module, or `mesh` does not divide it.
std::vector<PlacedParameter> place(const NamedModule& module, const ParallelStyle& style, const DeviceMesh& mesh);

/// Whether the style joins another one of its module.
bool joins(const ParallelStyle& style);

} // namespace tessera::internal::parallel
