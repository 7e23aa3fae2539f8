#include <tessera/reads/construction_mode.h>

#include <ATen/core/function_schema.h>

#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

/// Nothing else includes the key.
bool is_constructing_on_meta() { return c10::impl::tls_is_dispatch_key_included(kTouchKey); }

ConstructOnMeta::ConstructOnMeta() : touches_(kTouchKey) {}

void replace_device_with_meta(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") (*stack)[begin + i] = c10::Device(c10::kMeta);
    if (arguments[i].name() == "pin_memory") (*stack)[begin + i] = c10::IValue();
  }
}

} // namespace tessera::internal
