#include <tessera/fsdp/reads/written_views.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <absl/container/inlined_vector.h>
#include <absl/strings/match.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/fsdp/reads/parameter_view.h>

namespace tessera::internal {

namespace {

using dispatch::replace_tensors;
using dispatch::visit_tensors;
using torch::jit::Stack;
using Arguments = std::span<c10::IValue>; // of a call, on the stack

/// The results that are written arguments, as the program holds these.
void put_back(const OperatorTraits& traits, const Stack& given, Stack* stack) {
  const size_t first = stack->size() - traits.returns.size();
  for (size_t r = 0; r < traits.returns.size(); ++r) {
    const int argument = traits.returns[r].written_argument;
    if (argument >= 0) (*stack)[first + r] = given[static_cast<size_t>(argument)];
  }
}

/// The boxed call of an operator with several out= arguments drops these from the stack before it returns them.
void call_held(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack) {
  const Stack held(stack->end() - static_cast<int64_t>(traits.arguments.size()), stack->end());
  op.callBoxed(stack);
}

/// Puts the DTensors in the place of the views. False, and the arguments stay, where one that is written would be a copy, or has
/// no part on which the operator could run.
bool place_parts(const OperatorTraits& traits, Arguments arguments) {
  Stack placed(arguments.begin(), arguments.end());
  realize_views(traits, placed);
  bool is_copied = false;
  visit_tensors(traits, placed, [&](const at::Tensor& tensor, size_t argument) {
    const auto* meta = traits.arguments[argument].written ? dtensor_meta(tensor) : nullptr;
    is_copied |= meta && (meta->copied_at_version || meta->spec->has_partial());
  });
  if (!is_copied) std::move(placed.begin(), placed.end(), arguments.begin());
  return !is_copied;
}

/// Before anything is written: a DTensor beside the views that is a copy cannot be.
void check_no_copy_is_written(const c10::OperatorHandle& op, const OperatorTraits& traits, Arguments arguments) {
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
    if (traits.arguments[argument].written && is_dtensor(tensor) && !parameter_view(tensor))
      check_copy(tensor, *dtensor_meta(tensor), /*written=*/true, op.schema().name());
  });
}

/// On every rank, with a part or without: of an element, those without it have a view of nothing, which in InferenceMode counts
/// no versions.
void count_writes(const OperatorTraits& traits, Stack& given) {
  visit_tensors(traits, given, [&](const at::Tensor& tensor, size_t argument) {
    const auto* view = traits.arguments[argument].written ? parameter_view(tensor) : nullptr;
    if (view) view->parameter_meta().local.unsafeGetTensorImpl()->bump_version();
  });
}

/// The whole tensor on the mesh's device, where forward would read it.
at::Tensor full(const at::Tensor& tensor) {
  const DTensor dtensor(tensor);
  return dtensor.full_tensor().to(dtensor.mesh().device());
}

/// The wholes of the DTensors that a call reads or writes, some of them through views of parameters.
class Wholes {
 public:
  at::Tensor of(const at::Tensor& tensor, bool is_written) {
    const auto* view = parameter_view(tensor);
    auto& whole = view ? found(view->parameter) : found(tensor);
    whole.is_written |= is_written;
    if (!view) return whole.values;
    const auto& geometry = view->geometry;
    return whole.values.as_strided(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  }
  void write_back() const {
    for (const auto& each : wholes_) {
      if (each.is_written) at::Tensor(each.tensor).copy_(each.values.to(each.tensor.device()));
    }
  }

 private:
  struct Whole {
    at::Tensor tensor, values;
    bool is_written = false;
  };

  static bool are_one(const at::Tensor& tensor, const at::Tensor& other) {
    if (dtensor_meta(tensor) == dtensor_meta(other)) return true;
    const auto *meta = parameter_meta(tensor), *of_other = parameter_meta(other);
    return meta && of_other && meta->group == of_other->group && meta->index == of_other->index;
  }

  Whole& found(const at::Tensor& tensor) {
    for (auto& each : wholes_) {
      if (are_one(each.tensor, tensor)) return each;
    }
    auto values = full(tensor);
    if (parameter_meta(tensor)) { // of which views are taken
      values = at::empty_strided(tensor.sizes(), tensor.strides(), values.options()).copy_(values);
    } else if (values.is_alias_of(dtensor_meta(tensor)->local)) {
      values = values.clone();
    }
    return wholes_.emplace_back(Whole{tensor, std::move(values)});
  }

  absl::InlinedVector<Whole, 1> wholes_;
};

void run_on_wholes(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack) {
  Wholes wholes;
  replace_tensors(traits, Arguments(*stack).last(traits.arguments.size()),
                  [&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
                    if (!is_dtensor(tensor)) return std::nullopt;
                    return wholes.of(tensor, traits.arguments[argument].written);
                  });
  call_held(op, traits, stack);
  wholes.write_back();
}

/// squeeze_ and the like: the view becomes what the operator without the underscore gives of it.
void reshape_view(const c10::OperatorHandle& op, Stack* stack, at::Tensor view) { // a copy, as its place on the stack is taken
  const auto& name = op.operator_name();
  const auto without = name.name.substr(0, name.name.size() - 1);
  const auto overload = without == "aten::transpose" ? "int" : name.overload_name;
  const auto found = absl::EndsWith(name.name, "_") ? c10::Dispatcher::singleton().findSchema({without, overload}) : std::nullopt;
  TORCH_CHECK(found && without != "aten::resize", name.name, " on a view of ", dtensor_meta(view)->provenance.name->to_string(),
              " that was taken without grad mode: take another view, or use a copy (`clone()`)");
  found->callBoxed(stack);
  view.unsafeGetTensorImpl()->shallow_copy_from(stack->back().toTensor().getIntrusivePtr());
  stack->back() = std::move(view);
}

} // namespace

void run_on_written_views(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack, bool is_among_dtensors) {
  const auto arguments = Arguments(*stack).last(traits.arguments.size());
  Stack given(arguments.begin(), arguments.end());
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    TORCH_CHECK(!tensor.requires_grad() || !at::GradMode::is_enabled() || is_dtensor(tensor), op.schema().name(),
                ": a tensor that requires a gradient is written into a view of a sharded parameter that was taken without grad "
                "mode, through which no gradient flows. Write its detach()");
  });
  if (traits.special == Special::kReshapes) return reshape_view(op, stack, arguments[0].toTensor());
  check_no_copy_is_written(op, traits, arguments);
  if (is_among_dtensors && place_parts(traits, arguments)) {
    call_held(op, traits, stack);
    count_writes(traits, given);
  } else {
    run_on_wholes(op, traits, stack);
  }
  put_back(traits, given, stack);
}

} // namespace tessera::internal
