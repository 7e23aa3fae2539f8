#pragma once

// Internal: the dispatch side of `on_meta`.

#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace c10 {
struct FunctionSchema;
}

namespace tessera::internal {

/// True on a thread inside `on_meta`.
bool is_constructing_on_meta();

/// Points every `device` argument of the call on the stack at the meta device.
void replace_device_with_meta(const c10::FunctionSchema& schema, torch::jit::Stack* stack);

/// While it lives, this thread's ops go through the dispatch of reads, which makes new tensors on the meta device.
class ConstructOnMeta {
 public:
  ConstructOnMeta();

 private:
  const c10::impl::IncludeDispatchKeyGuard touches_; // all ops
};

} // namespace tessera::internal
