#include <tessera/fsdp/unreduced_gradient.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <span>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>

namespace tessera::internal {

namespace {

at::Tensor make_unreduced(const ShardedParameter& parameter, at::Tensor reduced) {
  const auto& sizes = parameter.spec->local_sizes();
  const auto options = parameter.local.options().requires_grad(false);
  auto meta = c10::make_intrusive<UnreducedGradient>(at::empty({}, options).expand(sizes), parameter.spec, nullptr, 0);
  meta->name = parameter.gradient_name;
  meta->reduced = std::move(reduced);
  auto gradient = at::empty({0}, options);
  auto* unreduced = meta.get();
  become_dtensor(gradient, std::move(meta), c10::DispatchKeySet(kTouchKey));
  unreduced->local = at::empty(sizes, options.device(at::kMeta)); // nobody must take it for values
  return gradient;
}

} // namespace

void UnreducedGradient::check_has_values(std::string_view reader) const {
  TORCH_CHECK(
      false, reader, " reads ", name->to_string(), " on rank ", process_context().rank(),
      ", which was accumulated and never reduced: the last backward before an optimizer step, or before clipping, must run "
      "outside of tessera::no_sync, with set_requires_gradient_sync, set_requires_all_reduce and set_is_last_backward true");
}

UnreducedGradient* unreduced_gradient(const at::TensorBase& tensor) {
  constexpr auto both = c10::DispatchKeySet({kDTensorKey, kTouchKey});
  if (!tensor.defined() || !tensor.key_set().has_all(both)) return nullptr;
  return dynamic_cast<UnreducedGradient*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

at::Tensor& reduced_gradient(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  auto* unreduced = unreduced_gradient(gradient);
  return unreduced ? unreduced->reduced : gradient;
}

void withhold_gradient(const ShardedParameter& parameter) {
  const at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined() || unreduced_gradient(tensor.grad())) return;
  auto& gradient = tensor.mutable_grad();
  gradient = make_unreduced(parameter, std::move(gradient));
}

void release_gradient(const ShardedParameter& parameter) {
  const at::Tensor tensor(parameter.tensor.lock());
  auto* unreduced = tensor.defined() ? unreduced_gradient(tensor.grad()) : nullptr;
  if (!unreduced) return;
  auto reduced = std::move(unreduced->reduced);
  tensor.mutable_grad() = std::move(reduced);
}

void run_on_unreduced(const c10::OperatorHandle& op, const OperatorTraits& traits, std::vector<c10::IValue>* stack) {
  const auto& name = op.schema().name();
  const auto arguments = std::span(*stack).last(traits.arguments.size());
  const bool clears = name == "aten::zero_";
  auto* first = arguments[0].isTensor() ? unreduced_gradient(arguments[0].toTensor()) : nullptr;
  if (first && (clears || name == "aten::detach" || name == "aten::detach_" || name == "aten::requires_grad_")) {
    if (clears && first->reduced.defined()) first->reduced.zero_();
    return stack->resize(stack->size() - arguments.size() + 1); // the tensor itself is the result
  }
  dispatch::visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    if (const auto* gradient = unreduced_gradient(tensor)) gradient->check_has_values(name);
  });
}

} // namespace tessera::internal
