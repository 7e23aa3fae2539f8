#include <tessera/fsdp/gradients/unreduced_gradient.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <utility>

#include <tessera/base/meta_memory.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal {

namespace {

/// Lets those operators of `zero_grad` alone run, which clears what was reduced. Any other gets an error that names the gradient.
class UnreducedKind final : public ReadKind {
 public:
  constexpr UnreducedKind() : ReadKind(Turn::kRefuses) {}
  MetSet meets(const at::Tensor&, size_t, const OperatorTraits&) const override { return {}; }
  void on_read(ReadCall& call) const override {
    const auto& name = call.op.schema().name();
    const bool clears = name == "aten::zero_";
    auto* first = call.arguments[0].isTensor() ? unreduced_gradient(call.arguments[0].toTensor()) : nullptr;
    if (first && (clears || name == "aten::detach" || name == "aten::detach_" || name == "aten::requires_grad_")) {
      if (clears && first->reduced.defined()) first->reduced.zero_();
      return call.return_arguments(1);
    }
    dispatch::visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
      if (auto* gradient = unreduced_gradient(tensor)) gradient->check_has_values(name);
    });
  }
};
constexpr UnreducedKind kUnreducedGradients;

at::Tensor make_unreduced(const ShardedParameter& parameter, at::Tensor reduced) {
  const auto& sizes = parameter.spec->local_sizes();
  const auto options = parameter.local.options().requires_grad(false);
  auto meta = c10::make_intrusive<UnreducedGradient>(at::empty({}, options).expand(sizes), parameter.spec);
  meta->provenance.name = parameter.gradient_name;
  meta->reduced = std::move(reduced);
  auto gradient = at::empty({0}, options);
  auto* unreduced = meta.get();
  become_dtensor(gradient, std::move(meta), c10::DispatchKeySet(kTouchKey));
  const MemoryUseScope stand_in(MemoryUse::kNothing);
  unreduced->local = at::empty(sizes, options.device(at::kMeta)); // nobody must take it for values
  return gradient;
}

} // namespace

UnreducedGradient::UnreducedGradient(at::Tensor local_tensor, SpecPtr tensor_spec)
    : ReadMeta(std::move(local_tensor), std::move(tensor_spec), kUnreducedGradients) {}

void UnreducedGradient::check_has_values(std::string_view reader) {
  TORCH_CHECK(
      false, reader, " reads ", provenance.name->to_string(), " on rank ", process_context().rank(),
      ", which was accumulated and never reduced: the last backward before an optimizer step, or before clipping, must run "
      "outside of tessera::no_sync, with set_requires_gradient_sync, set_requires_all_reduce and set_is_last_backward true");
}

UnreducedGradient* unreduced_gradient(const at::TensorBase& tensor) {
  auto* const meta = read_meta(tensor);
  return meta && meta->kind == &kUnreducedGradients ? static_cast<UnreducedGradient*>(meta) : nullptr;
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

} // namespace tessera::internal
