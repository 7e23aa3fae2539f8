#pragma once

// Internal: how a group's gradients lie, for an extension of their reduction.

#include <memory>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/reduction_extension.h>

namespace tessera::internal {

std::shared_ptr<const GradientLayout> gradient_layout_of(const ParameterGroup& group, const std::vector<bool>& takes_part,
                                                         const ReduceLayout& layout, at::ScalarType dtype);

/// The reductions of a group, as an extension sees them.
std::vector<ReductionStage> reduction_stages_of(const MeshRoles& roles, const Stages& of_group);

/// The group's extension of its reductions, for the parameters that take part; null where it has none. An error for gradients
/// that no extension takes.
std::shared_ptr<ReductionExtension> make_reduction_extension(const ParameterGroup& group, const std::vector<bool>& takes_part,
                                                             const ReduceLayout& layout, at::ScalarType dtype);

} // namespace tessera::internal
