#pragma once

// Internal: the dispatch side of `on_meta`.

#include <ATen/core/stack.h>

namespace c10 {
struct FunctionSchema;
}

namespace tessera::fsdp_internal {

/// True on a thread inside `on_meta`.
bool is_constructing_on_meta();

/// Points every `device` argument of the call on the stack at the meta device.
void replace_device_with_meta(const c10::FunctionSchema& schema, torch::jit::Stack* stack);

/// While it lives, this thread's ops go through the touch dispatch, which makes new tensors on the meta device.
class ConstructOnMeta {
 public:
  ConstructOnMeta();
  ~ConstructOnMeta();
  ConstructOnMeta(const ConstructOnMeta&) = delete;
  ConstructOnMeta& operator=(const ConstructOnMeta&) = delete;

 private:
  bool was_constructing_;
  bool key_was_included_;
};

} // namespace tessera::fsdp_internal
