#pragma once

// Internal: what the schedule of a model notes of each of its groups.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/parameter_group.h>

namespace tessera::internal {

using GroupPtr = std::shared_ptr<ParameterGroup>;

/// What is gathered ahead when a group is needed.
struct PrefetchSettings {
  using Groups = std::vector<std::weak_ptr<ParameterGroup>>;
  bool is_prefetched_in_backward = true; ///< the group itself, by others
  int64_t depth = 1;                     ///< groups, in the recorded order
  Groups in_forward, in_backward;        ///< in place of those, where there are any
};

/// Why a group is gathered ahead: it comes next, or a list of `PrefetchSettings` says so.
enum class Ahead { kOfOrder, kOfList };

/// The numbers of a module's groups. If there are several, they are reduced together.
struct ModuleNumbers {
  size_t first, end;
  bool has_buckets() const { return end - first > 1; }
};

/// A group in the schedule of its model, and what the schedule notes of it.
struct ScheduledGroup {
  std::weak_ptr<ParameterGroup> group; ///< empty for a module without parameters of its own
  std::shared_ptr<GroupGradients> gradients;
  std::shared_ptr<const PrefetchSettings> prefetch;
  ModuleNumbers module;          ///< its own number is one of these
  size_t end;                    ///< at `module.first`: the groups below its module have the numbers from `module.end` to here
  int64_t order_position = -1;   ///< in the recorded forward order
  uint64_t recorded_forward = 0; ///< the last forward that recorded it there
  uint64_t checked_forward = 0;  ///< the last one whose model was looked at in grad mode
  uint64_t joined_phase = 0;     ///< the last backward in which it was to be reduced, perhaps with a bucket beside it
  uint64_t phase = 0;            ///< the last phase (forward or backward) that saw a read of this group
  uint64_t recomputation = 0;    ///< whose second run read it last in a backward; 0: a forward did, or none
  Ahead ahead = Ahead::kOfOrder; ///< why it was gathered last before its read
  bool is_listed = false;        ///< among those whose gradients are unfinished
  bool is_held = false;          ///< by `unshard`, until its first read
  bool is_reduced = false;       ///< in this backward, and open for the frozen parameters that it may still read
};

} // namespace tessera::internal
