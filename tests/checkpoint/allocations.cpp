#include "allocations.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

struct Meter {
  bool on = false;
  size_t largest = 0;
  std::ptrdiff_t in_use = 0, peak = 0;
};
thread_local Meter meter;

} // namespace

// The library's calls come here too: a program's own functions go before those of shared libraries.
void* operator new(size_t bytes) {
  void* memory = std::malloc(std::max<size_t>(bytes, 1));
  if (!memory) throw std::bad_alloc();
  if (meter.on) {
    meter.largest = std::max(meter.largest, bytes);
    meter.in_use += static_cast<std::ptrdiff_t>(::malloc_usable_size(memory));
    meter.peak = std::max(meter.peak, meter.in_use);
  }
  return memory;
}

void operator delete(void* memory) noexcept {
  if (meter.on && memory) meter.in_use -= static_cast<std::ptrdiff_t>(::malloc_usable_size(memory));
  std::free(memory);
}

void operator delete(void* memory, size_t /*bytes*/) noexcept { operator delete(memory); }

namespace tessera::testing {

AllocationMeter::AllocationMeter() { meter = {.on = true}; }
AllocationMeter::~AllocationMeter() { meter.on = false; }

size_t AllocationMeter::largest() const { return meter.largest; }
size_t AllocationMeter::peak() const { return static_cast<size_t>(meter.peak); }

} // namespace tessera::testing
