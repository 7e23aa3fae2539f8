#pragma once

#include <tessera/collectives/backends/shared_memory/lane.h>
#include <tessera/collectives/backends/shared_memory/motion.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::internal::shared_memory {

/// How the data of one call get to this member, once all have published it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Goes as far as it can without waiting. True when this member has its result, and all have what they need of it in the lane.
  virtual bool advance() = 0;
  /// The members that it waits for, or those that left before this one had read their input: by index.
  virtual std::vector<int> absent() const { return {}; }
};

/// The transfer of `motion`, which must outlive it. The same kind on every member: small inputs lie in the slots; those that all
/// lie in arenas are read there; others go through the chunks. `arenas`: where that of each member lies here, which must outlive
/// it too; empty where there are none. `has_left`: whether that member does nothing more in the group; outlives it as well.
std::unique_ptr<Transfer> make_transfer(Lane& lane, const Motion& motion, uint64_t call, const std::vector<char*>& arenas,
                                        const std::function<bool(int member)>& has_left);

} // namespace tessera::internal::shared_memory
