#include "allocations.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

struct Meter {
  bool on = false;
  size_t largest = 0, total = 0;
  std::ptrdiff_t in_use = 0, peak = 0;
};
thread_local Meter meter;

void* allocate(size_t bytes) noexcept {
  void* memory = std::malloc(std::max<size_t>(bytes, 1));
  if (meter.on && memory) {
    meter.largest = std::max(meter.largest, bytes);
    meter.total += bytes;
    meter.in_use += static_cast<std::ptrdiff_t>(::malloc_usable_size(memory));
    meter.peak = std::max(meter.peak, meter.in_use);
  }
  return memory;
}

} // namespace

// The library's calls come here too: a program's own functions go before those of shared libraries. AddressSanitizer has its own
// of those that are not replaced, and wants memory back through the kind of function that gave it: so both kinds are here.
void* operator new(size_t bytes) {
  void* memory = allocate(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept { return allocate(bytes); }

void operator delete(void* memory) noexcept {
  if (meter.on && memory) meter.in_use -= static_cast<std::ptrdiff_t>(::malloc_usable_size(memory));
  std::free(memory);
}

void operator delete(void* memory, size_t /*bytes*/) noexcept { operator delete(memory); }

namespace tessera::testing {

AllocationMeter::AllocationMeter() { meter = {.on = true}; }
AllocationMeter::~AllocationMeter() { meter.on = false; }

size_t AllocationMeter::largest() const { return meter.largest; }
size_t AllocationMeter::total() const { return meter.total; }
size_t AllocationMeter::peak() const { return static_cast<size_t>(meter.peak); }

} // namespace tessera::testing
