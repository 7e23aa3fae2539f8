#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Which positions of a sequence the ranks of a mesh dim hold.
enum class PartOrder : uint8_t {
  kContiguous, ///< rank i has the i-th of c equal parts
  kHeadTail,   ///< of 2c equal chunks rank i has i and 2c - 1 - i: all ranks do the same work in causal attention
};

namespace internal {

/// How a sequence was split over the ranks of a mesh dim. The name of the dim says it ("cp:head-tail", "cp:contiguous+3"), so
/// that it goes wherever tensors on the mesh go.
struct PartLayout {
  PartOrder order = PartOrder::kContiguous;
  int64_t padding = 0; ///< positions that were added at the end
  bool operator==(const PartLayout&) const = default;
};

/// Positions [begin, end) of the whole sequence.
struct PositionRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const PositionRange&) const = default;
};

inline const char* name_of(PartOrder order) { return order == PartOrder::kHeadTail ? "head-tail" : "contiguous"; }

/// A sequence is split into equal parts where this divides its length.
inline int64_t divisor_of(PartOrder order, int64_t ranks) {
  return order == PartOrder::kHeadTail && ranks > 1 ? 2 * ranks : ranks;
}

/// The name of the dim `name` for tensors that are split so.
inline std::string name_with(const std::string& name, const PartLayout& layout) {
  auto text = (name.empty() ? "cp" : name.substr(0, name.find(':'))) + ":" + name_of(layout.order);
  return layout.padding == 0 ? text : text + "+" + std::to_string(layout.padding);
}

/// What the name of a dim says; nothing for a name that says nothing of parts.
inline std::optional<PartLayout> layout_in(const std::string& name) {
  const auto colon = name.find(':');
  if (colon == std::string::npos) return std::nullopt;
  const auto text = name.substr(colon + 1), order = text.substr(0, text.find('+'));
  PartLayout layout;
  if (order == name_of(PartOrder::kHeadTail)) {
    layout.order = PartOrder::kHeadTail;
  } else if (order != name_of(PartOrder::kContiguous)) {
    return std::nullopt;
  }
  if (order.size() < text.size()) std::from_chars(text.data() + order.size() + 1, text.data() + text.size(), layout.padding);
  return layout;
}

/// A dim of a mesh over which sequences are split, and how.
struct PartDim {
  int64_t dim = 0;
  PartLayout layout;
};

/// The first such dim of the mesh; nothing for a mesh that has none.
inline std::optional<PartDim> part_dim(const DeviceMesh& mesh) {
  const auto& names = mesh.dim_names();
  for (size_t dim = 0; dim < names.size(); ++dim) {
    if (const auto layout = layout_in(names[dim])) return PartDim{static_cast<int64_t>(dim), *layout};
  }
  return std::nullopt;
}

/// The positions of a sequence of `length` (padding included) that rank `rank` holds, in the order in which they lie there. The
/// length divides (`divisor_of`).
inline std::vector<PositionRange> part_ranges(PartOrder order, int64_t length, int64_t ranks, int64_t rank) {
  TORCH_INTERNAL_ASSERT(length % divisor_of(order, ranks) == 0);
  if (order == PartOrder::kContiguous || ranks == 1) return {{rank * (length / ranks), (rank + 1) * (length / ranks)}};
  const auto chunk = length / (2 * ranks), mirror = 2 * ranks - 1 - rank;
  return {{rank * chunk, (rank + 1) * chunk}, {mirror * chunk, (mirror + 1) * chunk}};
}

/// A range of positions that one rank holds, and where it begins in the part of that rank.
struct HeldRange {
  int64_t rank;
  int64_t offset;
  PositionRange positions;
};

/// What all ranks hold, in the order of the positions.
inline std::vector<HeldRange> held_ranges(PartOrder order, int64_t length, int64_t ranks) {
  std::vector<HeldRange> held;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t offset = 0;
    for (const auto& range : part_ranges(order, length, ranks, rank)) {
      held.push_back({rank, offset, range});
      offset += range.size();
    }
  }
  std::stable_sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.positions.begin < b.positions.begin; });
  return held;
}

} // namespace internal

} // namespace tessera
