// The dispatch above autograd, autocast and functorch. It sees every operator that reads a tensor with the key, and lets the
// kinds of these tensors decide what the operator gets.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tessera/reads/read_call.h>

namespace tessera::internal {

void on_read(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ReadCall(op, keys, stack).proceed();
}

// Recurrent modules ask it in Module::to, before they lay their weights out anew: a sharded parameter stays as it is, and is not
// gathered for the question.
TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("cudnn_is_acceptable", [](const at::Tensor&) { return false; });
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_read>()); }

} // namespace tessera::internal
