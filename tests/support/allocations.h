#pragma once

#include <cstddef>

namespace tessera::testing {

/// Measures what `operator new` gives to this thread while it lives; one at a time. Programs that use it link allocations.cpp.
class AllocationMeter {
 public:
  AllocationMeter();
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;
  ~AllocationMeter();

  size_t largest() const; ///< bytes of the largest allocation
  size_t total() const;   ///< bytes of all allocations
  size_t peak() const;    ///< most bytes in use at once, beyond those in use when it was made
};

} // namespace tessera::testing
