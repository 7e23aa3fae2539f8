#pragma once

// Internal: functions of whole tensors that ranks hold in parts.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// `compute` of each tensor as a whole, placed as the tensor is. Of tensors that ranks hold in parts each goes to one rank,
/// chosen so that all compute about as long (elements times the shorter side); its result goes back in parts. That takes two
/// all-to-alls for each set of mesh dims that split some of them, whatever the number of tensors; each rank sends and receives
/// about the bytes of its parts. What the ranks of a dim hold alike, each of them computes. Every rank of the meshes calls it
/// with the same list, of one dtype; `compute` keeps shape and dtype, and communicates nothing.
std::vector<at::Tensor> on_whole(const std::vector<at::Tensor>& tensors,
                                 const std::function<at::Tensor(const at::Tensor&)>& compute, std::string_view label);

} // namespace tessera::internal
