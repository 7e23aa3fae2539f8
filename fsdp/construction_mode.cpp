#include <tessera/fsdp/construction_mode.h>

#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <tessera/fsdp/unsharded_storage.h>

namespace tessera::fsdp_internal {

namespace {
thread_local bool constructing_on_meta = false;
}

bool is_constructing_on_meta() { return constructing_on_meta; }

void replace_device_with_meta(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") (*stack)[begin + i] = c10::Device(c10::kMeta);
    if (arguments[i].name() == "pin_memory") (*stack)[begin + i] = c10::IValue();
  }
}

ConstructOnMeta::ConstructOnMeta()
    : was_constructing_(std::exchange(constructing_on_meta, true)),
      key_was_included_(c10::impl::tls_is_dispatch_key_included(kTouchKey)) {
  c10::impl::tls_set_dispatch_key_included(kTouchKey, true);
}

ConstructOnMeta::~ConstructOnMeta() {
  constructing_on_meta = was_constructing_;
  c10::impl::tls_set_dispatch_key_included(kTouchKey, key_was_included_);
}

} // namespace tessera::fsdp_internal
