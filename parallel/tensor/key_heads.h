#pragma once

// Internal: grouped queries whose key heads do not divide among the ranks of tensor parallelism: groups of ranks compute them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/mesh/device_mesh.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal::parallel {

/// The ranks of the 1-D `line` in rows: [groups, ranks of one]. Each group has its share of the key heads, all ranks of it the
/// same. Undefined where the heads have no common divisor with the ranks, so that one group has all heads.
DeviceMesh in_groups(const DeviceMesh& line, int64_t heads);

/// `whole`, a DTensor that all ranks of a line have, on their `groups`, sharing its memory: whole, or this group's part of its
/// dim `cut`. Differentiable: the gradient of `whole` is a sum over the line, without communication.
at::Tensor read_in_groups(const at::Tensor& whole, const DeviceMesh& groups, std::optional<int64_t> cut);

/// Puts whole parameters on the groups of their ranks where another argument of `call` lies there.
void join_groups(ReadCall& call);

/// `activation` made whole on `line` where it lies on groups of its ranks, but under StrictSharding; as it is elsewhere.
at::Tensor on_line(const at::Tensor& activation, const DeviceMesh& line, const std::string& label);

/// Whether each rank has some heads of `query` [batch, heads, length, features] and more heads of `key` than those see: all of
/// them, on the same mesh, which they do not divide, or those of its group. `is_grouped`: a key head serves several of the query.
bool has_more_key_heads(const at::Tensor& query, const at::Tensor& key, bool is_grouped);

/// The key heads that the query heads of each rank see, split over the ranks as the query is: one a rank where its heads see
/// one, else those that they see, each once where that is as many on each rank, or once a query head. Several ranks may have the
/// same; the gradient of `key` is then their sum.
at::Tensor own_key_heads(const at::Tensor& query, const at::Tensor& key);

} // namespace tessera::internal::parallel
