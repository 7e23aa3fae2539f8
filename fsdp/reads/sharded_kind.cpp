// What stands in for FSDP2's module hooks: an op that reads a sharded parameter, its unsharded leaf or a view of the leaf comes
// here, which makes the group's unsharded parameters valid first.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <absl/algorithm/container.h>
#include <absl/container/inlined_vector.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <tessera/activations/kept_results.h>
#include <tessera/dtensor/calls/list_positions.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/view_replay.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/gradient_hooks.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reads/classify_read.h>
#include <tessera/fsdp/reads/parameter_view.h>
#include <tessera/fsdp/reads/plain_read.h>
#include <tessera/fsdp/reads/refusals.h>
#include <tessera/fsdp/reads/written_views.h>
#include <tessera/fsdp/schedule/schedule.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/nn/follow_scripts.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal {

namespace {

using dispatch::visit_tensors;
using torch::jit::Stack;
using Arguments = std::span<c10::IValue>; // of a call, on the stack

using GroupList = absl::InlinedVector<ParameterGroup*, 4>;

/// Before an op writes a parameter: waits for a gather that may still read its shard on another stream.
void wait_to_write(ParameterGroup& group) {
  if (!group.streams().gather.exists()) return;
  const ModelLock lock(schedule_of(group).mutex());
  group.wait_to_write(lock);
}

/// The group of a sharded parameter, or of a view of one; null for any other tensor.
ParameterGroup* group_of_parameter(const at::Tensor& tensor) {
  if (const auto* meta = parameter_meta(tensor)) return meta->group;
  const auto* view = parameter_view(tensor);
  return view ? view->parameter_meta().group : nullptr;
}

void wait_to_write(const ReadCall& call) {
  visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t argument) {
    auto* const group = call.traits.arguments[argument].written ? group_of_parameter(tensor) : nullptr;
    if (group) wait_to_write(*group);
  });
}

/// A parameter among other DTensors in grad mode: `(p - p0).square()` with a sharded copy `p0`.
std::optional<at::Tensor> dtensor_leaf_of(const at::Tensor& tensor) {
  auto* meta = parameter_meta(tensor);
  if (!meta || !tensor.requires_grad()) return std::nullopt;
  auto& parameter = meta->group->parameters()[meta->index];
  if (!is_same_leaf(parameter, tensor)) return std::nullopt; // a detached one has its own gradient
  if (!parameter.other_leaves.among_dtensors.defined()) {
    parameter.other_leaves.among_dtensors = make_dtensor_leaf(tensor, meta->group->weak_from_this(), meta->index);
    share_version(at::Tensor(parameter.tensor.lock()), parameter.other_leaves.among_dtensors);
  }
  return parameter.other_leaves.among_dtensors;
}

bool casts_activations(const ParameterGroup& group) {
  const auto& policy = group.options().mixed_precision;
  return policy.param_dtype && policy.cast_forward_inputs;
}

/// Casts the floating-point activations beside a leaf to its dtype, where the policy wants it (FSDP2: cast_forward_inputs). That
/// is `param_dtype`, or Float for a leaf of keep_in_fp32.
void cast_activations(ReadCall& call) {
  const auto& traits = call.traits;
  std::optional<at::ScalarType> dtype;
  const ParameterGroup* group = nullptr;
  visit_tensors(traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* leaf = leaf_behind(tensor);
    if (dtype || !leaf) return;
    group = &group_of_leaf(*leaf);
    if (casts_activations(*group) && tensor.is_floating_point()) dtype = tensor.scalar_type();
  });
  if (!dtype) return;
  const auto& kept = traits.written_undeclared;
  call.replace([&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    if (!tensor.is_floating_point() || tensor.scalar_type() == *dtype || tensor.dim() == 0) return std::nullopt;
    if (absl::c_linear_search(kept, argument) || traits.arguments[argument].written || tensor.key_set().has(kTouchKey) ||
        leaf_behind(tensor))
      return std::nullopt;
    // The inputs were cast where the call began: this one was computed since, or is a buffer.
    const bool promotes = group->owner->is_called() && call.op.hasTag(at::Tag::pointwise);
    if (promotes && c10::promoteTypes(tensor.scalar_type(), *dtype) != *dtype)
      group->owner->note_rounding(call.op.schema().name(), tensor.scalar_type(), *dtype);
    return tensor.to(*dtype);
  });
}

/// The groups whose parameters a call reads.
GroupList groups_read(const ReadCall& call) {
  GroupList groups;
  visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    if (!tensor.key_set().has(kTouchKey)) return;
    auto* const group = tensor.key_set().has(kDTensorKey) ? group_of_parameter(tensor) : &group_of_leaf(tensor);
    if (group && !absl::c_linear_search(groups, group)) groups.push_back(group);
  });
  return groups;
}

/// While it lives, the read of one does not free another: of one model, or of several.
absl::InlinedVector<std::unique_ptr<Schedule::KeepOpen>, 2> keep_open(const GroupList& groups) {
  absl::InlinedVector<std::unique_ptr<Schedule::KeepOpen>, 2> keep;
  if (groups.size() < 2) return keep;
  absl::InlinedVector<Schedule*, 2> schedules;
  for (auto* group : groups) {
    auto* const schedule = &schedule_of(*group);
    if (absl::c_linear_search(schedules, schedule)) continue;
    schedules.push_back(schedule);
    keep.push_back(std::make_unique<Schedule::KeepOpen>(*schedule, std::vector<ParameterGroup*>(groups.begin(), groups.end())));
  }
  return keep;
}

/// Puts the unsharded leaves in the place of parameters, and makes those and the leaves among the arguments valid. Whether the
/// activations beside them are to be cast.
bool unshard_arguments(ReadCall& call, bool substitutes) {
  const auto groups = groups_read(call);
  const auto keep = keep_open(groups);
  if (substitutes) {
    call.replace([](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
      if (!parameter_meta(tensor) && !parameter_view(tensor)) return std::nullopt;
      return unsharded(tensor);
    });
  }
  if (call.met(Met::kWhole)) {
    for (auto* group : groups) schedule_of(*group).read(*group);
  }
  return absl::c_any_of(groups, [](const auto* group) { return casts_activations(*group); });
}

/// Whether `Tensor::to` is given a memory format of which the answer may depend on the strides.
bool asks_for_strides(Arguments arguments) {
  const auto& format = arguments.back(); // the last argument of all its overloads
  return format.isInt() && static_cast<at::MemoryFormat>(format.toInt()) != at::MemoryFormat::Preserve;
}

/// Whether `Tensor::to` would return the parameter itself, its first argument, asked of a stand-in; Module::to must not unshard
/// it then.
bool converts_nothing(const c10::OperatorHandle& op, Arguments arguments) {
  const auto* meta = parameter_meta(arguments[0].toTensor());
  if (!meta || asks_for_strides(arguments)) return false;
  const auto& parameter = meta->group->parameters()[meta->index];
  if (!parameter.leaf.defined() || parameter.leaf.scalar_type() != parameter.spec->dtype()) return false;
  const auto stand_in = at::empty({0}, parameter.leaf.options().requires_grad(false));
  Stack call(arguments.begin(), arguments.end());
  call[0] = stand_in;
  op.callBoxed(&call);
  return call[0].toTensor().is_same(stand_in);
}

/// The distance from the parameter's first element, of a sharded parameter or a view of one; none for any other tensor.
std::optional<int64_t> offset_in_parameter(const at::Tensor& tensor) {
  const bool counts = parameter_meta(tensor) || parameter_view(tensor);
  return counts ? std::optional(tensor.storage_offset()) : std::nullopt;
}

/// A storage offset counts from the parameter's first element, and its leaf lies somewhere in the group's storage. `before`: the
/// offset of what the leaf, or a view of it, has taken the place of.
void shift_storage_offset(const ReadCall& call, int64_t before) {
  auto& offset = call.arguments[*call.traits.storage_offset];
  if (offset.isInt()) offset = offset.toInt() + call.arguments[0].toTensor().storage_offset() - before;
}

/// What is written into the places of a parameter, and what names them, may lie where the parameter does or on the device: goes
/// to where it is written.
void move_to_device(ReadCall& call) {
  const auto device = call.arguments[0].toTensor().device();
  call.replace([&](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    return tensor.key_set().has(kTouchKey) || tensor.dim() == 0 ? std::nullopt : std::optional(tensor.to(device));
  });
}

/// Whether what a composite takes may be hidden: nothing that it returns is a parameter or a view of one, which a program writes
/// as such.
bool may_hide(const OperatorTraits& traits) {
  return traits.is_composite && !traits.writes && !traits.returns_alias && !traits.returns_argument;
}

/// The parameters that a composite takes beside other DTensors without grad mode, for the ops that it is made of: these are to
/// see none that may be made whole.
void hide_parameters(ReadCall& call) {
  call.replace([](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    auto* meta = parameter_meta(tensor);
    if (!meta || needs_graph(tensor)) return std::nullopt;
    auto hidden = make_dtensor(c10::intrusive_ptr<DTensorMeta>::reclaim_copy(meta));
    if (!hidden.is_inference() && !tensor.is_inference()) share_version(tensor, hidden); // autograd may save it
    return hidden;
  });
}

/// Whether the op gives the view of a parameter that it is given, or asks nothing of its shape: detach, requires_grad_.
bool keeps_views(const OperatorTraits& traits) { return traits.is_metadata_only && (traits.returns_alias || traits.writes); }

/// Puts what the call needs in the place of parameters, and makes the groups that it reads valid. Whether the activations beside
/// them are to be cast.
bool prepare(ReadCall& call, Use use) {
  const auto& traits = call.traits;
  const bool is_off_device = call.met(Met::kOffDevice);
  switch (use) {
    case Use::kWritesPlaces:
    case Use::kInForward: {
      const auto offset = traits.storage_offset ? offset_in_parameter(call.arguments[0].toTensor()) : std::nullopt;
      const bool casts = unshard_arguments(call, /*substitutes=*/true);
      if (offset) shift_storage_offset(call, *offset);
      if (use == Use::kWritesPlaces && is_off_device) move_to_device(call);
      return casts;
    }
    case Use::kAmongDTensors:
      call.replace([](const at::Tensor& tensor, size_t) { return dtensor_leaf_of(tensor); });
      [[fallthrough]];
    case Use::kAsDTensors:
      if (call.met(Met::kView) && !keeps_views(traits)) realize_views(traits, call.arguments);
      if (call.met(Met::kParameter) && call.met(Met::kDTensor) && may_hide(traits)) hide_parameters(call);
      if (traits.writes_at_indices && call.met(Met::kWrittenParameter) && is_off_device) move_to_device(call);
      return call.met(Met::kWhole) && !traits.is_metadata_only && unshard_arguments(call, /*substitutes=*/false);
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// The keys of a call whose parameters lie in the host's memory, for the leaves on the device that have taken their places: the
/// kernels are the device's, and so is autocast.
c10::DispatchKeySet keys_on_device(const ReadCall& call) {
  auto keys = call.below;
  c10::DispatchKeySet of_arguments;
  visit_tensors(call.traits, call.arguments,
                [&](const at::Tensor& tensor, size_t) { of_arguments = of_arguments | tensor.key_set(); });
  constexpr uint64_t backends = c10::full_backend_mask;
  keys = {c10::DispatchKeySet::RAW, (keys.raw_repr() & ~backends) | (of_arguments.raw_repr() & backends)};
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  for (const auto autocast : c10::autocast_dispatch_keyset) {
    if (of_arguments.has(autocast) && !excluded.has(autocast) && call.op.hasKernelForDispatchKey(autocast))
      keys = keys.add(autocast);
  }
  return keys;
}

using WrittenRanges = absl::InlinedVector<std::pair<ParameterGroup*, UnshardedRange>, 1>;

/// The memory of leaves that the call writes.
WrittenRanges written_ranges(const ReadCall& call) {
  WrittenRanges written;
  if (C10_LIKELY(!call.met(Met::kWrittenWhole))) return written;
  visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t argument) {
    const bool is_leaf = tensor.key_set().has(kTouchKey) && !tensor.key_set().has(kDTensorKey);
    if (is_leaf && call.traits.arguments[argument].written)
      written.emplace_back(&group_of_leaf(tensor), UnshardedRange::of(tensor));
  });
  return written;
}

/// Makes DTensors of the leaves that a call reads beside activations whose sequences are split. Those that alias the shard have
/// no key.
void join_activations(ReadCall& call, const SplitActivations& activations) {
  call.replace([&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    if (!unsharded_storage(tensor) || call.traits.arguments[argument].written) return std::nullopt;
    return beside_split_sequences(tensor, activations.mesh, activations.dim);
  });
}

/// Whether the activations beside a leaf may be cast: in a forward. A hook may evaluate a model without grad mode, but what it
/// computes element by element may be a gradient, which keeps its dtype.
bool may_cast(ReadCall& call) {
  return is_forward(call.origin()) || (is_beside_nodes(call.origin()) && !call.op.hasTag(at::Tag::pointwise));
}

/// Runs a call in which parameters have one of the uses, and keeps what it writes.
void run(ReadCall& call) {
  auto written = written_ranges(call);
  const auto activations = split_activations(call);
  const Use use = classify(call);
  const bool is_whole = use == Use::kInForward || use == Use::kWritesPlaces;
  c10::IValue parameter; // whose places are written; it is returned
  if (use == Use::kWritesPlaces) parameter = call.arguments[0];
  const bool casts = prepare(call, use);
  if (C10_UNLIKELY(activations.has_value())) join_activations(call, *activations);
  const bool is_plain = is_whole && !activations && !call.met_any({Met::kParallel, Met::kComputed, Met::kConstant}) &&
                        !KeptResults::Scope::active();
  if (is_plain) call.below = call.below.remove(kDTensorKey);
  if (is_whole && call.met(Met::kOffDevice)) call.below = keys_on_device(call);
  if ((is_whole && !activations) || (call.met(Met::kWhole) && !call.met(Met::kDTensor)))
    end_view_replay(); // a plain computation goes on
  if (casts && may_cast(call)) cast_activations(call);
  call.proceed();
  end_view_replay(); // autograd has asked
  if (use == Use::kWritesPlaces) {
    const auto* meta = parameter_meta(parameter.toTensor());
    written.emplace_back(meta->group, UnshardedRange::of(meta->group->parameters()[meta->index].leaf));
    call.stack->back() = parameter;
  }
  for (const auto& [group, range] : written) schedule_of(*group).write_back(*group, range);
}

MetSet in_group(const ParameterGroup& group, bool is_written) {
  MetSet met = Met::kParameter;
  if (is_written) met = met | Met::kWrittenParameter;
  return group.is_off_device() ? met | Met::kOffDevice : met;
}

class ShardedKind final : public ReadKind {
 public:
  constexpr ShardedKind() : ReadKind(Turn::kSubstitutes) {}

  MetSet meets(const at::Tensor& tensor, size_t argument, const OperatorTraits& traits) const override {
    const bool is_written = traits.arguments[argument].written;
    if (!tensor.key_set().has(kDTensorKey)) return is_written ? MetSet(Met::kWhole, Met::kWrittenWhole) : Met::kWhole;
    if (const auto* meta = parameter_meta(tensor)) {
      const auto met = in_group(*meta->group, is_written);
      return C10_UNLIKELY(meta->parallel != nullptr) ? met | Met::kParallel : met;
    }
    const auto* view = parameter_view(tensor);
    if (!view) return Met::kComputed; // a detached copy that outlived its group
    const auto met = in_group(*view->parameter_meta().group, is_written) | Met::kView;
    return is_written && !traits.is_metadata_only ? met | Met::kWrittenView : met;
  }

  PlainRead plain_read(const at::Tensor& tensor) const override {
    const auto* const meta = parameter_meta(tensor);
    const auto* const storage = tensor.key_set().has(kDTensorKey) ? nullptr : unsharded_storage(tensor);
    const auto* const group = meta ? meta->group : storage ? storage->group() : nullptr;
    if (!group || (meta && (group->is_off_device() || !is_plain_in_forward(*meta, tensor)))) return {};
    const bool casts = casts_activations(*group) && tensor.is_floating_point();
    return {group,
            casts ? std::optional(meta ? group->parameters()[meta->index].forward.dtype : tensor.scalar_type()) : std::nullopt};
  }
  at::Tensor plain(const at::Tensor& tensor) const override {
    if (const auto* const meta = parameter_meta(tensor)) return read_plain(*meta, tensor);
    auto& group = group_of_leaf(tensor);
    schedule_of(group).read(group);
    return tensor;
  }

  at::Tensor leaf_in_graph(const at::Tensor& tensor) const override { return dtensor_leaf_of(tensor).value_or(at::Tensor()); }

  void on_read(ReadCall& call) const override {
    check_keeps_parameters(call.op, call.traits, call.arguments);
    if (C10_UNLIKELY(runs_optimized_script())) throw_read_by_optimized_script(call.traits, call.arguments);
    if (call.met(Met::kWrittenParameter)) wait_to_write(call);
    if (call.traits.special == Special::kConverts && converts_nothing(call.op, call.arguments)) return call.return_arguments(1);
    if (may_make_views(call) && make_views(call.op, call.traits, call.stack)) return;
    // A view is asked for its values once the positions before its own are written.
    if (C10_UNLIKELY(call.met(Met::kView)) && dispatch::written_positions(call.traits, call.arguments) > 1)
      return dispatch::run_by_position(call.op, call.traits, call.stack, [&](Stack* position) { call.op.callBoxed(position); });
    if (C10_LIKELY(!call.met(Met::kWrittenView))) return run(call);
    run_on_written_views(call.op, call.traits, call.stack, /*is_among_dtensors=*/!call.met_any({Met::kPlain, Met::kWhole}));
  }
};
constexpr ShardedKind kShardedKind;

} // namespace

const ReadKind& kShardedParameters = kShardedKind;

} // namespace tessera::internal
