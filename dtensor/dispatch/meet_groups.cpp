#include <tessera/dtensor/dispatch/meet_groups.h>

#include <ATen/core/grad_mode.h>
#include <absl/algorithm/container.h>

#include <optional>
#include <span>

#include <tessera/dtensor/calls/call_origin.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera::internal::dispatch {

namespace {

/// What a call has on either mesh.
struct BothMeshes {
  std::optional<DeviceMesh> groups, line;
  bool line_is_whole = true, writes_groups = false, writes_line = false;

  void add(const Spec& spec, bool is_written) {
    const bool is_in_groups = PlannedMeshes::instance().line_of(spec.mesh()).has_value();
    (is_in_groups ? groups : line) = spec.mesh();
    (is_in_groups ? writes_groups : writes_line) |= is_written;
    if (!is_in_groups) line_is_whole &= spec.is_replicated();
  }
  bool are_two() const { return groups && line && PlannedMeshes::instance().line_of(*groups) == line; }
  const DeviceMesh& goal() const { return writes_groups || (line_is_whole && !writes_line) ? *groups : *line; }
};

bool reads_two_meshes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const DeviceMesh* first = nullptr;
  return any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (!meta) return false;
    if (!first) first = &meta->spec->mesh();
    return !(meta->spec->mesh() == *first);
  });
}

/// Whether ranks have the same under `placement` on each dim of the rows as under it on the line.
bool lies_alike(const Placement& placement, const Spec& spec) {
  if (is_replicate(placement) || placement == Placement(Partial{})) return true;
  const auto* shard = std::get_if<Shard>(&placement);
  return shard && spec.sizes()[static_cast<size_t>(shard->dim)] % spec.mesh().size() == 0;
}

/// The placement on all dims of either mesh which a tensor of `spec` takes before it changes meshes: its own, a finer cut of what
/// each rank of a group has, or Replicate.
Placement on_both(const Spec& spec) {
  const auto& own = spec.placements();
  const bool is_alike = absl::c_all_of(own, [&](const auto& each) { return each == own[0]; });
  const bool is_cut = own.size() == 2 && std::holds_alternative<Shard>(own[0]) && is_replicate(own[1]);
  return (is_alike || is_cut) && lies_alike(own[0], spec) ? own[0] : Placement(Replicate{});
}

Placements on_all_dims(const DeviceMesh& mesh, const Placement& placement) {
  return Placements(static_cast<size_t>(mesh.ndim()), placement);
}

void check_needs_no_gather(const OpInfo& info, const DTensorMeta& meta) {
  if (!program_scopes().strict_sharding || !is_forward(call_origin())) return;
  const bool gathers = absl::c_any_of(meta.spec->placements(), is_sharded) && is_replicate(on_both(*meta.spec));
  TORCH_CHECK(!gathers, info.name, ": an argument, ", description_of(meta), ", lies as ", meta.spec->to_string(),
              ", which this operator cannot take beside another of the same ranks: it would have to be gathered, and the plan of "
              "`parallelize` does not say so. Under tessera::StrictSharding this is an error");
}

at::Tensor brought(const at::Tensor& tensor, const DeviceMesh& goal, const char* label) {
  const auto placement = on_both(*dtensor_meta(tensor)->spec);
  const auto moved = move(tensor, on_all_dims(dtensor_meta(tensor)->spec->mesh(), placement), label);
  const auto& from = *dtensor_meta(moved)->spec;
  return make_dtensor(dtensor_meta(moved)->local,
                      Spec::intern(goal, on_all_dims(goal, placement), from.sizes(), from.dtype(), from.strides()));
}

} // namespace

bool bring_to_one_mesh(const OpInfo& info, torch::jit::Stack* stack) {
  const auto arguments = arguments_of(info, *stack);
  if (info.returns_list || !reads_two_meshes(info, arguments)) return false;
  BothMeshes meshes;
  visit_tensors(info, arguments, [&](const at::Tensor& tensor, size_t argument) {
    if (const auto* meta = dtensor_meta(tensor)) meshes.add(*meta->spec, info.arguments[argument].written);
  });
  if (!meshes.are_two()) return false;
  const auto goal = meshes.goal();
  const at::NoGradGuard no_grad;
  bool changes = false;
  replace_tensors(info, std::span(*stack).last(info.arguments.size()),
                  [&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
                    const auto* meta = info.arguments[argument].written ? nullptr : dtensor_meta(tensor);
                    if (!meta || meta->spec->mesh() == goal) return std::nullopt;
                    check_needs_no_gather(info, *meta);
                    changes = true;
                    return brought(tensor, goal, info.name.c_str());
                  });
  return changes;
}

} // namespace tessera::internal::dispatch
