// LibTorch's own fused optimizers write in place, and checks of values have none here: kernels with nothing to do take the calls.

#include <tessera/plan/shapes/meta_library.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::internal::shapes {

namespace {

void write_nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

} // namespace

void add_optimizers(MetaLibrary& library) {
  for (const auto* name : {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_",
                           "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
                           "_amp_foreach_non_finite_check_and_unscale_", "_assert_async", "_assert_async.msg"})
    library.add(name, torch::CppFunction::makeFromBoxedFunction<&write_nothing>());
}

} // namespace tessera::internal::shapes
