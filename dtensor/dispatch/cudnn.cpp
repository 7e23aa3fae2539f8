#include <tessera/dtensor/dispatch/cudnn.h>

#include <tessera/dtensor/calls/op_info.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/dispatch/fallback.h>

namespace tessera::internal::dispatch {

namespace {

using torch::jit::Stack;

constexpr auto kCompositeKey = c10::DispatchKey::CompositeImplicitAutograd;

bool reads_dtensor(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& info = op_info(op);
  return has_dtensors(info, arguments_of(info, stack));
}

/// cuDNN's kernel has no rule, and updates running statistics that its schema does not declare as written.
void disable_for_dtensors(const c10::OperatorHandle& op, Stack* stack) {
  if (reads_dtensor(op, *stack)) stack->back() = false; // cudnn_enabled
}

void run_batch_norm(const c10::OperatorHandle& op, Stack* stack) {
  disable_for_dtensors(op, stack);
  op.callBoxedForDispatchKey(kCompositeKey, *stack);
}

void run_batch_norm_without_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  disable_for_dtensors(op, stack);
  run(op, keys, stack);
}

/// Recurrent modules ask it of their input: cuDNN's kernel would read the storage of their weights, which DTensors do not have.
/// (Of a sharded parameter itself they ask fsdp, whose key comes first.)
void is_acceptable(const c10::OperatorHandle& op, Stack* stack) {
  if (!reads_dtensor(op, *stack)) return op.callBoxedForDispatchKey(kCompositeKey, *stack);
  stack->back() = false;
}

template <auto batch_norm>
void register_choices(torch::Library& library) {
  library.impl("_batch_norm_impl_index", torch::CppFunction::makeFromBoxedFunction<batch_norm>());
  library.impl("cudnn_is_acceptable", torch::CppFunction::makeFromBoxedFunction<&is_acceptable>());
}

} // namespace

void register_cudnn_choices(torch::Library& library) { register_choices<&run_batch_norm>(library); }

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { register_cudnn_choices(library); }
TORCH_LIBRARY_IMPL(aten, Fake, library) { register_choices<&run_batch_norm_without_autograd>(library); }

} // namespace tessera::internal::dispatch
