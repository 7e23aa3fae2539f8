#include <tessera/plan/shapes/meta_library.h>

#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>

#include <span>

namespace tessera::internal::shapes {

namespace {

Tensor of_numbers(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return elementwise({condition, self, other});
}
Tensor is_nan(const Tensor& self) {
  const auto like = elementwise({self});
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kBool));
}

/// Gives the result that the call writes its shape.
void write_result(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = std::span(*stack).last(arguments.size());
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(true);
  Tensor out;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
    const auto* alias = arguments[i].alias_info();
    if (alias && alias->isWrite()) {
      out = values[i].toTensor();
      config.add_owned_output(out);
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool is_read = values[i].isTensor() && values[i].toTensor().defined() && !(alias && alias->isWrite());
    if (is_read) config.add_owned_const_input(values[i].toTensor());
  }
  config.build();
  torch::jit::drop(*stack, arguments.size());
  torch::jit::push(*stack, std::move(out));
}

} // namespace

void add_element_wise(MetaLibrary& library) {
  library.add("where.self", of_numbers);
  library.add("isnan", is_nan);
  for (const auto* name :
       {"where.self_out", "abs.out", "angle.out", "conj_physical.out", "logical_and.out", "logical_or.out", "logical_xor.out",
        "logical_not.out", "nan_to_num.out", "logit.out", "smooth_l1_loss_backward.grad_input", "huber_loss_backward.out"})
    library.add(name, torch::CppFunction::makeFromBoxedFunction<&write_result>());
}

} // namespace tessera::internal::shapes
