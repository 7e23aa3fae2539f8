#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

namespace tessera {

/// While it lives, these are errors, in this thread and in the backwards that it calls:
/// - an operator without a sharding rule, which otherwise runs on whole tensors, with a warning;
/// - a random operator on a DTensor while the generators of the mesh's ranks differ, so that the ranks would draw parts of
///   different tensors. To find out, each such operator gathers the generators' states (5 KB a rank on the CPU);
/// - a `local_map` of an argument that has other placements than those that it was made for.
class StrictSharding {
 public:
  StrictSharding();
  StrictSharding(const StrictSharding&) = delete;
  StrictSharding& operator=(const StrictSharding&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

} // namespace tessera
