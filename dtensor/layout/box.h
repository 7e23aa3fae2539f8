#pragma once

// Internal: rectangular parts of a tensor, and which of them a rank holds.

#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/placement.h>

namespace tessera::internal {

/// A rectangular part of a tensor: one offset and one size a dim. A 0-dim tensor has one box, without dims, of one element.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy takes the 0 that it compares with for a pointer
  auto operator<=>(const Box&) const = default;
};

/// The box of the whole tensor.
Box whole(const std::vector<int64_t>& sizes);

/// The common part; nothing when the boxes are disjoint. Both have the same number of dims.
std::optional<Box> intersect(const Box& a, const Box& b);

/// Two of these boxes, all of the same number of dims, that have an element in common; nothing when there are none. Empty boxes
/// have none.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const Box*>& boxes);

/// Bytes of a tensor whose sizes may come from a file; nothing when they do not fit in 63 bits.
std::optional<int64_t> checked_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

/// True when `inner` lies within a tensor of these sizes.
bool fits(const Box& inner, const std::vector<int64_t>& sizes);

/// Boxes that cover `box`, in row-major order, of at most about `bytes` each: whole rows of its first dim of several. `item` is
/// the size of an element.
std::vector<Box> split(const Box& box, int64_t item, int64_t bytes);

/// "[0:4, 2:3]".
std::string to_string(const Box& box);

/// The elements [begin, end) of the flattened dims 0..`dim` of `box`, whole in the dims after it, as at most 2·dim + 1 boxes in
/// row-major order.
std::vector<Box> boxes_of_range(const Box& box, int64_t dim, int64_t begin, int64_t end);

/// What the rank at `coordinate` of a mesh of `mesh_shape` holds of a tensor with these global sizes, without empty boxes.
/// Placements apply from the first mesh dim to the last. The boxes are in the order in which their elements lie in the
/// (row-major) local tensor. An error for Partial, for a StridedShard (`pieces_of_part` has what it describes), and for a Shard
/// of a dim that an earlier RaggedShard flattened with others.
std::vector<Box> local_boxes(const std::vector<int64_t>& sizes, const Placements& placements,
                             const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& coordinate);

} // namespace tessera::internal
