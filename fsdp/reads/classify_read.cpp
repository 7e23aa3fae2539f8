#include <tessera/fsdp/reads/classify_read.h>

#include <ATen/core/grad_mode.h>

#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/reads/parameter_view.h>
#include <tessera/mesh/part_order.h>

namespace tessera::internal {

using dispatch::visit_tensors;

const at::Tensor* leaf_behind(const at::Tensor& tensor) {
  const auto* meta = parameter_meta(tensor) || parameter_view(tensor) ? nullptr : dtensor_meta(tensor);
  const auto& plain = meta ? meta->local : tensor;
  return plain.key_set().has(kTouchKey) && !plain.key_set().has(kDTensorKey) ? &plain : nullptr;
}

std::optional<SplitActivations> split_activations(const ReadCall& call) {
  std::optional<SplitActivations> found;
  if (C10_LIKELY(!call.met(Met::kDTensor))) return found;
  dispatch::any_tensor(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (!meta || tensor.key_set().has(kTouchKey)) return false;
    const auto& mesh = meta->spec->mesh();
    if (const auto part = part_dim(mesh)) found = SplitActivations{mesh, part->dim};
    return true;
  });
  return found;
}

namespace {

/// The mesh of the DTensor as which forward reads a parameter; null where it reads a plain tensor.
const DeviceMesh* parallel_mesh(const at::Tensor& tensor) {
  const auto* meta = parameter_meta(tensor);
  return meta && meta->parallel ? &meta->parallel->mesh() : nullptr;
}

/// Whether a call reads a parameter that is a DTensor in forward too, beside another DTensor on its mesh there, or on groups of
/// its ranks.
bool is_beside_parallel(const ReadCall& call) {
  if (C10_LIKELY(!call.met(Met::kParallel)) || !call.met(Met::kDTensor)) return false;
  const DeviceMesh* mesh = nullptr;
  visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    if (const auto* found = parallel_mesh(tensor)) mesh = found;
  });
  return dispatch::any_tensor(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    const bool is_there = meta && (!tensor.key_set().has(kTouchKey) || leaf_behind(tensor)); // `weight.t()` of a leaf
    return is_there && (meta->spec->mesh() == *mesh || dispatch::PlannedMeshes::instance().line_of(meta->spec->mesh()) == *mesh);
  });
}

/// Optimizers, initializers, clipping and state dicts act on the parameter as a DTensor; what else reads it is a use in forward.
/// Without grad mode only an op that mixes it with plain tensors or may return a view of it and does not (`weight.to(device)`)
/// is, or any op in the backward of a torch::autograd::Function, or one of parameters of which some are offloaded and others not.
/// What other ops make of parameters alone (`1 + weight`) is a DTensor, which such a mix makes whole as well
/// (dtensor/dispatch/meet_plain.h). `1 - weight` reads it beside a constant of its shape. A parameter that is a DTensor in
/// forward too is known by its mesh there, on which its activations lie, and no optimizer's state; so are activations whose
/// sequences are split.
bool is_forward_read(ReadCall& call) {
  if (call.traits.is_metadata_only || call.met(Met::kWrittenParameter)) return false;
  if (is_beside_parallel(call) || split_activations(call)) return true;
  if (call.met(Met::kDTensor)) return false;
  if (call.met_any({Met::kPlain, Met::kWhole, Met::kApart})) return true;
  return !call.met(Met::kComputed) &&
         (at::GradMode::is_enabled() || call.traits.returns_alias || call.origin() == CallOrigin::kFunction);
}

} // namespace

bool may_make_views(ReadCall& call) {
  const auto& traits = call.traits;
  if (at::GradMode::is_enabled() || !call.met(Met::kParameter) || !traits.returns_alias || traits.is_metadata_only) return false;
  if (call.met(Met::kParallel)) return false;
  const bool is_alone =
      !call.met_any({Met::kPlain, Met::kWhole, Met::kComputed, Met::kConstant, Met::kDTensor, Met::kWrittenParameter});
  return is_alone && traits.special != Special::kConverts && !traits.storage_offset && call.origin() != CallOrigin::kFunction;
}

Use classify(ReadCall& call) {
  if (!call.met(Met::kParameter)) return Use::kAsDTensors;
  const bool writes = call.met(Met::kWrittenParameter);
  if (call.traits.writes_places && writes && call.met(Met::kPlain) && !call.met(Met::kDTensor)) return Use::kWritesPlaces;
  if (is_forward_read(call)) return Use::kInForward;
  const bool beside_dtensors = call.met_any({Met::kDTensor, Met::kComputed, Met::kConstant});
  return beside_dtensors && !writes && at::GradMode::is_enabled() ? Use::kAmongDTensors : Use::kAsDTensors;
}

} // namespace tessera::internal
