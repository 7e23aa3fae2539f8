#include <tessera/dtensor/calls/list_positions.h>

#include <ATen/ops/narrow.h>

#include <utility>

#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

/// A view of a sharded parameter is none: each read asks the parameter.
bool is_copy(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta && meta->copied_at_version && !tensor.key_set().has(c10::DispatchKey::DeferredInit);
}

/// A copy cannot be written, and one of what the call writes would be read as it was before.
void check_copies(const c10::OperatorHandle& op, const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  if (!any_tensor(schema, arguments, [](const at::Tensor& tensor, size_t) { return is_copy(tensor); })) return;
  const auto name = c10::toString(op.operator_name());
  const auto check = [&](bool written) {
    visit_tensors(schema, arguments, [&](const at::Tensor& tensor, size_t argument) {
      if (is_copy(tensor) && schema.arguments[argument].written == written)
        check_copy(tensor, *dtensor_meta(tensor), written, name);
    });
  };
  check(/*written=*/true);
  visit_tensors(schema, arguments, [&](const at::Tensor& tensor, size_t argument) {
    if (schema.arguments[argument].written && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  });
  check(/*written=*/false);
}

/// What one position has of an argument: the element of a list that is as long, and of a tensor of `scalars`.
c10::IValue at_position(const c10::Argument& argument, const c10::IValue& value, size_t position, size_t positions) {
  if (value.isList()) {
    const auto list = value.toList();
    if (list.size() != positions) return value;
    c10::impl::GenericList one(list.elementType());
    one.push_back(list.get(position));
    return one;
  }
  const bool is_of_positions = argument.name() == "scalars" && value.isTensor() && value.toTensor().dim() == 1;
  return is_of_positions ? value.toTensor().narrow(0, static_cast<int64_t>(position), 1) : value;
}

} // namespace

size_t written_positions(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  if (!schema.returns.empty()) return 0;
  for (const size_t i : schema.tensors) {
    if (schema.arguments[i].kind == ArgKind::kTensorList && schema.arguments[i].written) return arguments[i].toListRef().size();
  }
  return 0;
}

void run_by_position(const c10::OperatorHandle& op, const CallSchema& schema, torch::jit::Stack* stack,
                     absl::FunctionRef<void(torch::jit::Stack*)> run) {
  const auto arguments = arguments_of(schema, *stack);
  check_copies(op, schema, arguments);
  const auto positions = written_positions(schema, arguments);
  for (size_t position = 0; position < positions; ++position) {
    torch::jit::Stack call;
    for (size_t i = 0; i < arguments.size(); ++i)
      call.push_back(at_position(op.schema().arguments()[i], arguments[i], position, positions));
    run(&call);
  }
  stack->resize(stack->size() - arguments.size());
}

} // namespace tessera::internal::dispatch
