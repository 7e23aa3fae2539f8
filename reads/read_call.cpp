#include <tessera/reads/read_call.h>

#include <ATen/autocast_mode.h>
#include <absl/algorithm/container.h>
#include <c10/util/ScopeExit.h>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/reads/construction_mode.h>

namespace tessera::internal {

namespace {

/// Whether the DTensors that a call reads together lie on two meshes.
struct MeshesOfDTensors {
  void add(const DTensorMeta& meta) {
    const auto& mesh = meta.spec->mesh();
    are_two |= first && !(*first == mesh);
    first = &mesh;
  }
  const DeviceMesh* first = nullptr;
  bool are_two = false;
};

Met met_in_dtensor(const at::Tensor& tensor, const DTensorMeta& meta) {
  if (!meta.provenance.current_whole_dtype() || needs_graph(tensor)) return Met::kDTensor;
  return meta.provenance.of_shape_only ? Met::kConstant : Met::kComputed;
}

/// Autocast would keep its cast copies of whole unsharded parameters until the autocast scope ends.
void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool caches = keys.has_any(c10::autocast_dispatch_keyset) && at::autocast::is_autocast_cache_enabled();
  if (caches) at::autocast::set_autocast_cache_enabled(false);
  const auto restore = c10::make_scope_exit([caches] {
    if (caches) at::autocast::set_autocast_cache_enabled(true);
  });
  op.redispatchBoxed(keys, stack);
}

} // namespace

ReadCall::ReadCall(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* arguments_and_results)
    : op(handle),
      traits(traits_of(handle)),
      stack(arguments_and_results),
      arguments(std::span(*stack).last(traits.arguments.size())),
      below(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey)) {
  look();
}

void ReadCall::look() {
  dispatch::DevicesOfDTensors devices(traits);
  MeshesOfDTensors meshes;
  dispatch::visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* meta = dtensor_meta(tensor);
    if (meta) devices.add(tensor);
    if (meta && !traits.writes) meshes.add(*meta);
    const auto* kind = tensor.key_set().has(kTouchKey) ? kind_of(tensor) : nullptr;
    if (kind) {
      add(*kind);
      met_ = met_ | kind->meets(tensor, argument, traits);
    } else if (meta) {
      met_ = met_ | met_in_dtensor(tensor, *meta);
    } else if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      met_ = met_ | Met::kPlain;
    }
  });
  if (devices.are_two() || (meshes.are_two && !traits.returns_list)) met_ = met_ | Met::kApart;
}

void ReadCall::add(const ReadKind& kind) {
  if (C10_LIKELY(kinds_.empty())) return kinds_.push_back(&kind);
  if (absl::c_linear_search(kinds_, &kind)) return;
  auto place = kinds_.begin() + static_cast<int64_t>(next_); // behind those that have run
  while (place != kinds_.end() && (*place)->turn <= kind.turn) ++place;
  kinds_.insert(place, &kind);
}

void ReadCall::proceed() {
  if (next_ < kinds_.size()) return kinds_[next_++]->on_read(*this);
  // Redispatch, never exclude: composites must still see the key inside.
  if (is_constructing_on_meta()) replace_device_with_meta(op.schema(), stack);
  redispatch(op, below, stack);
}

} // namespace tessera::internal
