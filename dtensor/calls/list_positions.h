#pragma once

// Internal: operators that write a list, as `_foreach_add_`, called for one position of their lists after another.

#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/functional/function_ref.h>

#include <tessera/dtensor/calls/call_schema.h>

namespace tessera::internal::dispatch {

/// How many tensors the list has that the call writes; 0 where it writes none, or returns something.
size_t written_positions(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments);

/// Calls `run` for each of these positions, with the arguments of that alone. Takes the arguments of the whole call off the
/// stack. Before the first write it is an error where the call writes a copy, or reads one of what it writes.
void run_by_position(const c10::OperatorHandle& op, const CallSchema& schema, torch::jit::Stack* stack,
                     absl::FunctionRef<void(torch::jit::Stack*)> run);

} // namespace tessera::internal::dispatch
