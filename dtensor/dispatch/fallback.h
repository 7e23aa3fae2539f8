#pragma once

// Internal: the kernel behind the DTensor key.

#include <ATen/core/dispatch/Dispatcher.h>

#include <tessera/dtensor/calls/call_schema.h>
#include <tessera/dtensor/plan/plan_cache.h>

namespace tessera::internal::dispatch {

/// Runs an operator on the DTensors at the end of the stack: by the plan that its rule gives.
void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Whether a tensor among the arguments is a DTensor.
bool has_dtensors(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments);

/// The counters of this thread's plans, for tests and benchmarks.
CacheStatistics cache_statistics();
/// Drops this thread's plans, and with them the specs that only they hold.
void clear_cache();

} // namespace tessera::internal::dispatch
