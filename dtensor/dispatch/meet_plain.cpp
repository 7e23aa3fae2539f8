#include <tessera/dtensor/dispatch/meet_plain.h>

#include <c10/core/InferenceMode.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/plan.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/move.h>
#include <tessera/dtensor/view_replay.h>

namespace tessera::internal::dispatch {

namespace {

using torch::jit::Stack;

/// The whole of `tensor` for the operator `name`, both of which the collective's label says. On the mesh's device, where forward
/// would read it: the parts of a parameter may lie in the host's memory.
at::Tensor gather(const at::Tensor& tensor, const std::string& name) {
  const KeepViewReplay keep;
  const auto& meta = *dtensor_meta(tensor);
  const auto label = meta.name ? c10::str(name, " of ", meta.name->to_string()) : name;
  const auto& mesh = meta.spec->mesh();
  return to_local(differentiable_move(tensor, mesh, Placements(static_cast<size_t>(mesh.ndim())), label.c_str()))
      .to(mesh.device());
}

at::Tensor whole(const at::Tensor& tensor, const std::string& name) {
  const auto full = gather(tensor, name);
  const auto dtype = *whole_dtype_of(*dtensor_meta(tensor));
  return full.scalar_type() == dtype ? full : full.to(dtype);
}

/// Whether the call writes a DTensor that must stay one: a parameter, or a view that had to be copied.
bool writes_dtensor(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* meta = info.arguments[argument].written ? dtensor_meta(tensor) : nullptr;
    return meta && (!meta->computed || meta->copied_at_version);
  });
}

/// The whole of `tensor` takes the place of this rank's part, in the tensor itself: what the caller holds.
void become_whole(const at::Tensor& tensor, const OpInfo& info) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto& meta = *dtensor_meta(tensor);
  const bool is_shared = impl->get_backend_meta_intrusive_ptr().use_count() > 2 || shares_memory(meta);
  TORCH_CHECK(!is_shared, info.name, ": a plain tensor is written into ", meta.spec->to_string(), ", which was computed from ",
              meta.name ? meta.name->to_string() : "sharded parameters",
              " without grad mode and shares its memory with another tensor, so that it cannot become whole: write into a copy, "
              "or take full_tensor() first");
  const c10::InferenceMode mode(tensor.is_inference());  // its key set and its version counter are to fit each other
  const auto full = gather(tensor, info.name);           // in its own dtype, which a write does not change
  full.unsafeGetTensorImpl()->set_backend_meta(nullptr); // which takes the place of the DTensor's
  impl->shallow_copy_from(full.getIntrusivePtr());
}

/// Whether the call mixes plain tensors with DTensors all of which have a `whole_dtype`, or reads such DTensors on two
/// devices, since some of the parameters are offloaded. A write (`copy_`) may cross devices.
bool meets_plain(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  bool plain = false, dtensor = false;
  DevicesOfDTensors devices(info);
  const bool others = any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t) {
    if (const auto* meta = dtensor_meta(tensor)) {
      dtensor = true;
      devices.add(tensor);
      return !whole_dtype_of(*meta) || needs_graph(tensor);
    }
    plain |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return false;
  });
  return ((plain && dtensor) || devices.are_two()) && !others && !replicates_plain_tensors();
}

} // namespace

at::Tensor whole_if_computed(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta && meta->computed && whole_dtype_of(*meta) && !needs_graph(tensor) ? whole(tensor, "tessera::call") : tensor;
}

bool run_on_whole(const c10::OperatorHandle& op, const OpInfo& info, Stack* stack) {
  const auto arguments = arguments_of(info, *stack);
  if (C10_LIKELY(!meets_plain(info, arguments)) || (info.writes && writes_dtensor(info, arguments))) return false;
  const auto whole_of = [&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    if (!dtensor_meta(tensor)) return std::nullopt;
    if (!info.arguments[argument].written) return whole(tensor, info.name);
    become_whole(tensor, info);
    return std::nullopt;
  };
  replace_tensors(info, std::span(*stack).last(info.arguments.size()), whole_of);
  op.callBoxed(stack);
  return true;
}

} // namespace tessera::internal::dispatch
