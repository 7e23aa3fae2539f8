#pragma once

// Internal: the kernel behind the DTensor key.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>

#include <tessera/dtensor/calls/call_schema.h>

namespace tessera::internal::dispatch {

/// Runs an operator on the DTensors at the end of the stack: by the plan that its rule gives.
void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Whether a tensor among the arguments is a DTensor.
bool has_dtensors(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments);

/// Cache counters of this thread, for tests and benchmarks.
struct CacheStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;
  size_t entries = 0;
};
CacheStatistics cache_statistics();
/// Drops this thread's plans, and with them the specs that only they hold.
void clear_cache();

} // namespace tessera::internal::dispatch
