#include <tessera/fsdp/reads/parameter_view.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include <tessera/dtensor/calls/visit_tensors.h>

namespace tessera::internal {

namespace {

using torch::jit::Stack;

/// A meta tensor that lies as the whole of `tensor` does, a sharded parameter or a view of one; counted from the parameter's
/// first element.
at::Tensor geometry_of(const at::Tensor& tensor) {
  if (const auto* view = parameter_view(tensor)) return view->geometry;
  return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

/// `viewed` in the shape that `op` gave its geometry.
at::Tensor make_view(const at::Tensor& viewed, const at::Tensor& geometry, ViewStep step) {
  const auto* source = parameter_view(viewed);
  auto steps = source ? source->steps : std::vector<ViewStep>();
  steps.push_back(std::move(step));
  auto view = alias_dtensor(viewed);
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(geometry.sizes(), geometry.strides());
  impl->set_storage_offset(geometry.storage_offset());
  impl->set_backend_meta(
      c10::make_intrusive<ParameterView>(source ? source->parameter : alias_dtensor(viewed), geometry, std::move(steps)));
  return view;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& result) {
  return result.isTensor() ? std::vector{result.toTensor()} : result.toTensorVector();
}

const c10::IValue& result_of(const Stack& results, size_t output, c10::IValue& element) {
  if (results[0].isTensor()) return results[0];
  return element = results[0].toTensorVector()[output];
}

at::Tensor run_step(const ViewStep& step, const at::Tensor& viewed) {
  Stack stack(step.arguments.begin(), step.arguments.end());
  stack[0] = viewed;
  step.op.callBoxed(&stack);
  c10::IValue element;
  return result_of(stack, step.output, element).toTensor();
}

/// Whether `results`, of an op on `geometry`, are no copies, and of its dtype.
bool are_views(const std::vector<at::Tensor>& results, const at::Tensor& geometry) {
  return std::all_of(results.begin(), results.end(), [&](const at::Tensor& result) {
    return result.is_alias_of(geometry) && result.scalar_type() == geometry.scalar_type() && !result.is_conj() &&
           !result.is_neg();
  });
}

} // namespace

ParameterView::ParameterView(at::Tensor viewed, at::Tensor shape, std::vector<ViewStep> made_by)
    : ParameterMeta(shape, dtensor_meta(viewed)->spec, nullptr, 0),
      parameter(std::move(viewed)),
      geometry(std::move(shape)),
      steps(std::move(made_by)) {
  const auto& source = parameter_meta();
  provenance.name = source.provenance.name;
  provenance.computed = true;
  provenance.whole_dtype = source.provenance.whole_dtype;
}

ParameterMeta& ParameterView::parameter_meta() const {
  auto* meta = internal::parameter_meta(parameter);
  TORCH_CHECK(meta,
              "a view of a sharded parameter is read whose group is gone: its module was destroyed, or "
              "tessera::reshard_parameters made another group since the view was taken. Take the view again");
  return *meta;
}

void ParameterView::check_has_values(std::string_view) {
  const auto values = realized();
  const auto& meta = *dtensor_meta(values);
  local = meta.local;
  spec = meta.spec;
  copied_at_version = meta.copied_at_version;
}

at::Tensor ParameterView::realized() const {
  parameter_meta();
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard as_dtensor(kTouchKey);
  auto result = parameter;
  for (const auto& step : steps) result = run_step(step, result);
  return result;
}

bool make_views(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack) {
  const auto arguments = std::span(*stack).last(traits.arguments.size());
  if (!arguments[0].isTensor()) return false;
  if (traits.is_composite && traits.tensors.size() > 1) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    return true;
  }
  const auto viewed = arguments[0].toTensor();
  Stack call(arguments.begin(), arguments.end());
  dispatch::replace_tensors(traits, call, [](const at::Tensor& tensor, size_t) { return std::optional(geometry_of(tensor)); });
  const auto geometry = call[0].toTensor();
  const std::vector<c10::IValue> made_by(call.begin(), call.end());
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd; // nothing of a geometry has a gradient
    op.callBoxed(&call);
  }
  const auto results = tensors_of(call[0]);
  if (!are_views(results, geometry)) return false;
  std::vector<at::Tensor> views;
  for (const auto& result : results) views.push_back(make_view(viewed, result, {op, made_by, views.size()}));
  const bool is_list = !call[0].isTensor();
  stack->resize(stack->size() - traits.arguments.size());
  is_list ? stack->emplace_back(std::move(views)) : stack->emplace_back(std::move(views[0]));
  return true;
}

at::Tensor view_of_whole(const ParameterView& view, const at::Tensor& leaf) {
  auto* whole = leaf.unsafeGetTensorImpl();
  at::Tensor result(whole->shallow_copy_and_detach(whole->version_counter(), /*allow_tensor_metadata_change=*/true));
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(view.geometry.sizes(), view.geometry.strides());
  impl->set_storage_offset(leaf.storage_offset() + view.geometry.storage_offset());
  return result;
}

void check_needs_no_graph(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.requires_grad() || !at::GradMode::is_enabled(), "a view of ",
              dtensor_meta(tensor)->provenance.name->to_string(),
              " that was taken without grad mode and requires a gradient of its own is read: nothing would reduce that gradient. "
              "Use a view that is taken in grad mode, or train a copy of its values (`clone()`). In the forward of a "
              "torch::autograd::Function, take the view of tessera::unsharded(weight)");
}

void realize_views(const OperatorTraits& traits, std::span<c10::IValue> arguments) {
  dispatch::replace_tensors(traits, arguments, [](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    const auto* view = parameter_view(tensor);
    if (!view) return std::nullopt;
    check_needs_no_graph(tensor);
    return view->realized();
  });
}

} // namespace tessera::internal
