#pragma once

// Internal: which entries of a state an export writes, and under which names.

#include <functional>
#include <string>

#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/save/snapshot.h>

namespace tessera::internal {

using NameFilter = std::function<bool(const std::string&)>;
using NameMap = std::function<std::string(const std::string&)>;

/// Leaves a tensor those of its names that `filter` accepts; false where it accepts none.
bool filter_names(Holding& holding, const NameFilter& filter);

/// The entries whose names `filter` accepts (unset: all). A tied tensor stays under those of its names that are accepted.
Snapshot filtered(Snapshot snapshot, const NameFilter& filter);

/// The plan with every name, alias and value's name as `rename` gives it (unset: unchanged). Errors: an empty name, and two names
/// that become one.
SavePlan renamed(SavePlan plan, const NameMap& rename);

} // namespace tessera::internal
