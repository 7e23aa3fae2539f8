#include <tessera/dtensor/dispatch/meet_plain.h>

#include <absl/algorithm/container.h>
#include <c10/core/InferenceMode.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/plan/plan.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/view_replay.h>

namespace tessera::internal::dispatch {

namespace {

using torch::jit::Stack;

/// The whole of `tensor` for the operator `name`, both of which the collective's label says. On the mesh's device, where forward
/// would read it: the parts of a parameter may lie in the host's memory.
at::Tensor gather(const at::Tensor& tensor, const std::string& name) {
  const KeepViewReplay keep;
  const auto& meta = *dtensor_meta(tensor);
  const auto& named = meta.provenance.name;
  const auto label = named ? c10::str(name, " of ", named->to_string()) : name;
  const auto& mesh = meta.spec->mesh();
  return to_local(differentiable_move(tensor, mesh, Placements(static_cast<size_t>(mesh.ndim())), label.c_str()))
      .to(mesh.device());
}

at::Tensor whole(const at::Tensor& tensor, const std::string& name) {
  const auto full = gather(tensor, name);
  const auto dtype = *dtensor_meta(tensor)->provenance.current_whole_dtype();
  return full.scalar_type() == dtype ? full : full.to(dtype);
}

/// Whether the call writes a DTensor that must stay one: a parameter, or a view that had to be copied.
bool writes_dtensor(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* meta = info.arguments[argument].written ? dtensor_meta(tensor) : nullptr;
    return meta && (!meta->provenance.computed || meta->copied_at_version);
  });
}

/// The whole of `tensor` takes the place of this rank's part, in the tensor itself: what the caller holds.
void become_whole(const at::Tensor& tensor, const OpInfo& info) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto& meta = *dtensor_meta(tensor);
  const bool is_shared = impl->get_backend_meta_intrusive_ptr().use_count() > 2 || shares_memory(meta);
  TORCH_CHECK(!is_shared, info.name, ": a plain tensor is written into ", meta.spec->to_string(), ", which was computed from ",
              meta.provenance.name ? meta.provenance.name->to_string() : "sharded parameters",
              " without grad mode and shares its memory with another tensor, so that it cannot become whole: write into a copy, "
              "or take full_tensor() first");
  const c10::InferenceMode mode(tensor.is_inference());  // its key set and its version counter are to fit each other
  const auto full = gather(tensor, info.name);           // in its own dtype, which a write does not change
  full.unsafeGetTensorImpl()->set_backend_meta(nullptr); // which takes the place of the DTensor's
  impl->shallow_copy_from(full.getIntrusivePtr());
}

/// Whether the call mixes plain tensors with DTensors all of which have a `whole_dtype`, or reads such DTensors of two meshes, or
/// on two devices, since some of the parameters are offloaded. A write (`copy_`) may cross devices.
bool meets_others(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  bool plain = false, two_meshes = false;
  const DTensorMeta* first = nullptr;
  DevicesOfDTensors devices(info);
  const bool others = any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t) {
    if (const auto* meta = dtensor_meta(tensor)) {
      devices.add(tensor);
      if (!meta->provenance.current_whole_dtype() || needs_graph(tensor)) return true;
      two_meshes |= first && meta->spec->mesh() != first->spec->mesh();
      first = meta;
      return false;
    }
    plain |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return false;
  });
  return ((plain && first) || two_meshes || devices.are_two()) && !others && !replicates_plain_tensors();
}

/// The mesh of a DTensor that the call writes.
DeviceMesh mesh_of_written(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  DeviceMesh mesh;
  any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* meta = info.arguments[argument].written ? dtensor_meta(tensor) : nullptr;
    if (meta) mesh = meta->spec->mesh();
    return meta != nullptr;
  });
  return mesh;
}

bool has_all_ranks(const DeviceMesh& mesh, const DeviceMesh& of) {
  const auto& ranks = mesh.ranks();
  return absl::c_all_of(of.ranks(), [&](int64_t rank) { return absl::c_linear_search(ranks, rank); });
}

/// What the call reads of another mesh becomes whole on each rank of the mesh of what it writes. That of a mesh without some of
/// these ranks stays: they may have tensors of other values there, or none.
void move_to_mesh_of_written(const OpInfo& info, Stack* stack) {
  const auto mesh = mesh_of_written(info, arguments_of(info, *stack));
  replace_tensors(info, std::span(*stack).last(info.arguments.size()),
                  [&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
                    const auto* meta = info.arguments[argument].written ? nullptr : dtensor_meta(tensor);
                    if (!meta || meta->spec->mesh() == mesh || !has_all_ranks(meta->spec->mesh(), mesh)) return std::nullopt;
                    const auto full = gather(tensor, info.name).to(mesh.device());
                    auto spec =
                        Spec::intern(mesh, Placements(mesh.ndim()), full.sizes().vec(), full.scalar_type(), full.strides().vec());
                    return make_dtensor(full, std::move(spec));
                  });
}

} // namespace

at::Tensor whole_if_computed(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto* provenance = meta && meta->provenance.computed ? &meta->provenance : nullptr;
  return provenance && provenance->current_whole_dtype() && !needs_graph(tensor) ? whole(tensor, "tessera::call") : tensor;
}

bool run_on_whole(const c10::OperatorHandle& op, const OpInfo& info, Stack* stack) {
  const auto arguments = arguments_of(info, *stack);
  if (C10_LIKELY(!meets_others(info, arguments))) return false;
  if (info.writes && writes_dtensor(info, arguments)) {
    move_to_mesh_of_written(info, stack);
    return false;
  }
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
