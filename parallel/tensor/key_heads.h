#pragma once

// Internal: grouped queries whose key heads are fewer than the ranks of tensor parallelism.

#include <ATen/core/Tensor.h>

namespace tessera::internal::parallel {

/// Whether each rank has some heads of `query` [batch, heads, length, features], and the fewer heads of `key`, all of them, do
/// not divide among the ranks. Both are DTensors of one mesh.
bool has_whole_key_heads(const at::Tensor& query, const at::Tensor& key);

/// The key heads that the query heads of each rank see, split over the ranks as the query is: one a rank where its heads are of
/// one group, else one a query head. Several ranks may have the same; the gradient of `key` is then their sum.
at::Tensor own_key_heads(const at::Tensor& query, const at::Tensor& key);

} // namespace tessera::internal::parallel
