#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <tessera/base/meta_memory.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/plan/plan.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

/// Zeros of the host: one element for all where the kernel neither writes it nor may take it for dense memory.
at::Tensor host_zeros(const at::Tensor& tensor, bool has_memory) {
  const auto options = tensor.options().device(at::kCPU);
  return has_memory ? at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_()
                    : at::zeros({}, options).expand(tensor.sizes());
}

at::Tensor stand_in_of(const at::Tensor& tensor, StandIn stand_in, bool has_memory) {
  auto result = stand_in == StandIn::kMeta
                    ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
                    : host_zeros(tensor, has_memory);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

void add(const c10::IValue& value, std::vector<rules::Geometry>& out) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined()) out.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
  } else if (value.isTensorList()) {
    for (const auto& element : value.toListRef()) add(element, out);
  }
}

/// The results of the operator on stand-ins; nothing where it has no kernel for them.
std::optional<torch::jit::Stack> run_on_stand_ins(const c10::OperatorHandle& op, const OpInfo& info,
                                                  c10::ArrayRef<c10::IValue> arguments, StandIn stand_in) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kDTensorKey));
  auto copy = arguments.vec();
  for (auto& value : copy) {
    if (value.isDevice()) value = c10::Device(stand_in == StandIn::kMeta ? at::kMeta : at::kCPU);
  }
  const bool of_program = op.operator_name().getNamespace() != "aten"; // a kernel that may read through a plain pointer
  replace_tensors(info, copy, [&](const at::Tensor& tensor, size_t argument) {
    return std::optional(stand_in_of(tensor, stand_in, of_program || info.arguments[argument].written));
  });
  try {
    op.callBoxed(copy);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt; // a composite kernel over one that has none for them
  } catch (const c10::LinAlgError&) {
    return std::nullopt; // of zeros
  } catch (const std::exception&) {
    if (stand_in == StandIn::kMeta) throw;
    return std::nullopt; // on this rank alone, where the kernel refuses zeros
  }
  return copy;
}

} // namespace

std::optional<std::vector<rules::Geometry>> infer_outputs(const c10::OperatorHandle& op, const OpInfo& info,
                                                          c10::ArrayRef<c10::IValue> arguments, StandIn stand_in) {
  bool new_outputs = false;
  for (const auto& result : info.returns) new_outputs |= result.written_argument < 0;
  if (!new_outputs || (stand_in == StandIn::kMeta && !info.infers_shapes)) return std::nullopt;
  const MemoryUseScope stand_ins(MemoryUse::kNothing);
  const auto results = run_on_stand_ins(op, info, arguments, stand_in);
  if (!results) return std::nullopt;
  std::vector<rules::Geometry> result;
  bool left_out = false;
  for (const auto& value : *results) {
    const bool undefined = value.isTensor() && !value.toTensor().defined();
    if (undefined && stand_in == StandIn::kZeros) {
      result.push_back({{}, {}, at::kFloat});
      continue;
    }
    if (left_out && !undefined) return std::nullopt; // it is not told which outputs these are
    left_out |= undefined;
    add(value, result);
  }
  return result;
}

} // namespace tessera::internal::dispatch
