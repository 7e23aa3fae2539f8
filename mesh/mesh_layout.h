#pragma once

// Internal: how a dim of a mesh runs through the ranks of the mesh that it was sliced from.

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/collectives/rank_list.h>

namespace tessera::internal {

/// The steps of one dim through the places of a root mesh, the outermost first: one step in most cases, several where dims that
/// are no neighbours were flattened. They are joined where they continue each other, and those of size 1 are left out.
using DimLayout = std::vector<RankList::Steps>;

/// One dim of these steps, one after another.
DimLayout join(const std::vector<DimLayout>& dims);

/// The dims of `sizes`, whose product is the size of `dim`; nothing where a step of it would have to be cut unevenly.
std::optional<std::vector<DimLayout>> split(const DimLayout& dim, const std::vector<int64_t>& sizes);

/// How far from the root's place of index 0 the one of `index` is.
int64_t distance(const DimLayout& dim, int64_t index);

/// Whether two indices of all dims together may lead to one place.
bool overlap(const std::vector<DimLayout>& dims);

} // namespace tessera::internal
