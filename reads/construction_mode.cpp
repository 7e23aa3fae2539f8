#include <tessera/reads/construction_mode.h>

#include <ATen/core/function_schema.h>

#include <utility>

#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

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

ConstructOnMeta::ConstructOnMeta() : was_constructing_(std::exchange(constructing_on_meta, true)), touches_(kTouchKey) {}

ConstructOnMeta::~ConstructOnMeta() { constructing_on_meta = was_constructing_; }

} // namespace tessera::internal
