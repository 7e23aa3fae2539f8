// The dispatch above autograd that stands in for FSDP2's module hooks: it sees every op that reads a sharded parameter, its
// unsharded leaf, or a view of the leaf, and makes the group's unsharded parameters valid first.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <absl/algorithm/container.h>
#include <absl/container/inlined_vector.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <tessera/activations/kept_results.h>
#include <tessera/activations/recomputation.h>
#include <tessera/dtensor/dispatch/call_site.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>
#include <tessera/dtensor/in_backward.h>
#include <tessera/dtensor/move.h>
#include <tessera/dtensor/view_replay.h>
#include <tessera/fsdp/construction_mode.h>
#include <tessera/fsdp/flat_views.h>
#include <tessera/fsdp/gradient_hooks.h>
#include <tessera/fsdp/operator_traits.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/schedule.h>
#include <tessera/fsdp/sharded_module.h>
#include <tessera/fsdp/unreduced_gradient.h>
#include <tessera/fsdp/unsharded.h>

namespace tessera::internal {

namespace {

using torch::jit::Stack;

using dispatch::replace_tensors;
using dispatch::visit_tensors;
using Arguments = std::span<c10::IValue>; // of a call, on the stack

using GroupList = absl::InlinedVector<ParameterGroup*, 4>;

/// What a call does with sharded parameters and their leaves.
struct Reads {
  bool parameter = false; ///< a sharded parameter is among the arguments
  bool writes_parameter = false;
  bool plain = false;    ///< … and a plain tensor that is no number
  bool computed = false; ///< … and a DTensor computed from such parameters alone
  bool constant = false; ///< … and one made from the shape of such a parameter (`ones_like`)
  bool other_dtensor = false;
  bool leaf = false;
  bool unreduced = false; ///< a gradient that waits for its reduction
  bool offloaded = false; ///< a sharded parameter lies elsewhere than what forward reads of it
  bool apart = false;     ///< … and elsewhere than another DTensor among the arguments
  absl::InlinedVector<std::pair<ParameterGroup*, UnshardedRange>, 1> written_unsharded = {};
};

ParameterGroup& group_of_leaf(const at::Tensor& leaf) {
  auto* storage = unsharded_storage(leaf);
  TORCH_CHECK(storage && storage->group(),
              "an unsharded parameter is read whose group is gone: its module was destroyed, or tessera::reshard_parameters made "
              "another group since the forward that read it. Run the forward again");
  return *storage->group();
}

/// Before an op writes a parameter: waits for a gather that may still read its shard on another stream.
void wait_to_write(ParameterGroup& group) {
  if (!group.streams().gather.exists()) return;
  const auto lock = schedule_of(group).lock();
  group.wait_to_write();
}

void note_parameter(ParameterGroup& group, bool is_written, Reads& reads) {
  if (is_written) wait_to_write(group);
  reads.parameter = true;
  reads.offloaded = reads.offloaded || group.is_off_device();
  reads.writes_parameter = reads.writes_parameter || is_written;
}

Reads scan(const OperatorTraits& traits, Arguments arguments) {
  Reads reads;
  dispatch::DevicesOfDTensors devices(traits);
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto keys = tensor.key_set();
    const bool is_written = traits.arguments[argument].written;
    if (keys.has(kDTensorKey)) devices.add(tensor);
    if (keys.has(kTouchKey)) {
      if (const auto* meta = parameter_meta(tensor)) {
        note_parameter(*meta->group, is_written, reads);
      } else if (keys.has(kDTensorKey)) {
        reads.computed = true; // a detached copy that outlived its group
        reads.unreduced = reads.unreduced || unreduced_gradient(tensor);
      } else {
        reads.leaf = true;
        if (is_written) reads.written_unsharded.emplace_back(&group_of_leaf(tensor), UnshardedRange::of(tensor));
      }
    } else if (const auto* meta = dtensor_meta(tensor)) {
      const bool whole = whole_dtype_of(*meta) && !needs_graph(tensor);
      (!whole ? reads.other_dtensor : meta->of_shape_only ? reads.constant : reads.computed) = true;
    } else {
      reads.plain = reads.plain || !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    }
  });
  reads.apart = devices.are_two();
  return reads;
}

/// Optimizers, initializers, clipping and state dicts act on the parameter as a DTensor; what else reads it is a use in forward.
/// Without grad mode only an op that mixes it with plain tensors or returns a view of it (`weight.t()`) is, or any op in the
/// backward of a torch::autograd::Function, or one of parameters of which some are offloaded and others not. What other ops make
/// of parameters alone (`1 + weight`) is a DTensor, which such a mix makes whole as well (dtensor/dispatch/meet_plain.h).
/// `1 - weight` reads it beside a constant of its shape.
bool is_forward_read(const OperatorTraits& traits, const Reads& reads) {
  if (traits.is_metadata_only || reads.writes_parameter || reads.other_dtensor) return false;
  if (reads.plain || reads.leaf || reads.apart) return true;
  return !reads.computed && (at::GradMode::is_enabled() || traits.returns_alias || dispatch::in_custom_backward());
}

/// What a call does with the sharded parameters among its arguments.
enum class Use {
  kAsDTensors,    ///< reads or writes them as the DTensors that they are; or there are none
  kAmongDTensors, ///< in grad mode, beside other DTensors: a DTensor leaf takes a parameter's place
  kInForward,     ///< reads them whole: the unsharded leaf takes a parameter's place
  kWritesPlaces,  ///< writes those that a plain index or mask names: as to the whole, of which each rank keeps its part
};

Use classify(const OperatorTraits& traits, const Reads& reads) {
  if (!reads.parameter) return Use::kAsDTensors;
  if (traits.writes_places && reads.writes_parameter && reads.plain && !reads.other_dtensor) return Use::kWritesPlaces;
  if (is_forward_read(traits, reads)) return Use::kInForward;
  const bool beside_dtensors = reads.other_dtensor || reads.computed || reads.constant;
  const bool among = beside_dtensors && !reads.writes_parameter && at::GradMode::is_enabled();
  return among ? Use::kAmongDTensors : Use::kAsDTensors;
}

/// A parameter among other DTensors in grad mode: `(p - p0).square()` with a sharded copy `p0`.
std::optional<at::Tensor> dtensor_leaf_of(const at::Tensor& tensor) {
  auto* meta = parameter_meta(tensor);
  if (!meta || !tensor.requires_grad()) return std::nullopt;
  auto& parameter = meta->group->parameters()[meta->index];
  if (!is_same_leaf(parameter, tensor)) return std::nullopt; // a detached one has its own gradient
  if (!parameter.dtensor_leaf.defined()) {
    parameter.dtensor_leaf = make_dtensor_leaf(tensor, meta->group->weak_from_this(), meta->index);
    share_version(at::Tensor(parameter.tensor.lock()), parameter.dtensor_leaf);
  }
  return parameter.dtensor_leaf;
}

bool casts_activations(const ParameterGroup& group) {
  const auto& policy = group.options().mixed_precision;
  return policy.param_dtype && policy.cast_forward_inputs;
}

/// Casts the floating-point activations beside a leaf to its dtype, where the policy wants it (FSDP2: cast_forward_inputs). That
/// is `param_dtype`, or Float for a leaf of keep_in_fp32.
void cast_activations(const c10::OperatorHandle& op, const OperatorTraits& traits, Arguments arguments) {
  std::optional<at::ScalarType> dtype;
  const ParameterGroup* group = nullptr;
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    if (dtype || !tensor.key_set().has(kTouchKey) || tensor.key_set().has(kDTensorKey)) return;
    group = &group_of_leaf(tensor);
    if (casts_activations(*group) && tensor.is_floating_point()) dtype = tensor.scalar_type();
  });
  if (!dtype) return;
  const auto& kept = traits.written_undeclared;
  replace_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    if (!tensor.is_floating_point() || tensor.scalar_type() == *dtype || tensor.dim() == 0) return std::nullopt;
    if (absl::c_linear_search(kept, argument) || traits.arguments[argument].written || tensor.key_set().has(kTouchKey))
      return std::nullopt;
    // The inputs were cast where the call began: this one was computed since, or is a buffer.
    const bool promotes = group->owner->is_called() && op.hasTag(at::Tag::pointwise);
    if (promotes && c10::promoteTypes(tensor.scalar_type(), *dtype) != *dtype)
      group->owner->note_rounding(op.schema().name(), tensor.scalar_type(), *dtype);
    return tensor.to(*dtype);
  });
}

/// The groups whose parameters a call reads.
GroupList groups_read(const OperatorTraits& traits, Arguments arguments) {
  GroupList groups;
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    if (!tensor.key_set().has(kTouchKey)) return;
    const auto* meta = parameter_meta(tensor);
    if (!meta && tensor.key_set().has(kDTensorKey)) return;
    auto* group = meta ? meta->group : &group_of_leaf(tensor);
    if (!absl::c_linear_search(groups, group)) groups.push_back(group);
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
bool unshard_arguments(const OperatorTraits& traits, Arguments arguments, const Reads& reads, bool substitutes) {
  const auto groups = groups_read(traits, arguments);
  const auto keep = keep_open(groups);
  if (substitutes) {
    replace_tensors(traits, arguments, [](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
      if (!parameter_meta(tensor)) return std::nullopt;
      return unsharded(tensor);
    });
  }
  if (reads.leaf) {
    for (auto* group : groups) schedule_of(*group).touch(*group);
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

/// A storage offset counts from the parameter's first element, and its leaf lies somewhere in the group's storage.
void shift_storage_offset(const OperatorTraits& traits, Arguments arguments) {
  auto& offset = arguments[*traits.storage_offset];
  if (offset.isInt()) offset = offset.toInt() + arguments[0].toTensor().storage_offset();
}

/// An error of the text `before`, its name and `after` for each sharded parameter among the arguments.
void check_no_parameter(const OperatorTraits& traits, Arguments arguments, const char* before, const char* after) {
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = parameter_meta(tensor);
    TORCH_CHECK(!meta, before, meta->group->full_name(meta->index), after);
  });
}

/// The sharded parameter that `tensor` is, or stands for unsharded; null for any other tensor, as for a view of these.
const ShardedParameter* parameter_of(const at::Tensor& tensor) {
  if (const auto* meta = parameter_meta(tensor)) return &meta->group->parameters()[meta->index];
  if (!tensor.key_set().has(kTouchKey) || tensor.key_set().has(kDTensorKey)) return nullptr;
  for (const auto& parameter : group_of_leaf(tensor).parameters()) {
    if (tensor.is_same(parameter.leaf) || tensor.is_same(parameter.frozen_leaf)) return &parameter;
  }
  return nullptr;
}

void check_keeps_shape(const c10::OperatorHandle& op, const OperatorTraits& traits, Arguments arguments) {
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* parameter = traits.arguments[argument].written ? parameter_of(tensor) : nullptr;
    TORCH_CHECK(
        !parameter, op.schema().name(), " on the sharded parameter ", parameter->meta->group->full_name(parameter->meta->index),
        " would change its shape, and its group keeps the one that it was sharded with: reshape it before fully_shard, or "
        "use the operator that is not in place");
  });
}

void check_keeps_parameters(const c10::OperatorHandle& op, const OperatorTraits& traits, Arguments arguments) {
  switch (traits.special) {
    case Special::kNone:
    case Special::kConverts: return;
    case Special::kReshapes: return check_keeps_shape(op, traits, arguments);
    case Special::kReplacesData:
      // The data of itself: Module::to a device or dtype that it has already.
      if (arguments[0].toTensor().is_same(arguments[1].toTensor())) return;
      return check_no_parameter(
          traits, arguments, "set_data on the sharded parameter ",
          " would unshard it (Module::to does this): choose dtype and device before fully_shard, change the dtype "
          "with tessera::reshard_parameters(module, {.dtype = ...}), or use parameter.copy_(full_tensor) for values. torch::load "
          "does this too where the file's device is another one: load with tessera::checkpoint::load, or before fully_shard");
    case Special::kReplacesStorage:
      return check_no_parameter(traits, arguments, "set_ on the sharded parameter ",
                                " would unshard it (torch::load does this): load with tessera::checkpoint::load, or into the "
                                "module before fully_shard");
    case Special::kRenormalizes:
      return check_no_parameter(traits, arguments, "the embedding ",
                                " has a max_norm, which rewrites the rows that this rank's batch reads, and no other rank's copy "
                                "of them: build it without max_norm, and rescale the weight between steps");
  }
}

/// What is written into the places of a parameter, and what names them, may lie where the parameter does or on the device: goes
/// to where it is written.
void move_to_device(const OperatorTraits& traits, Arguments arguments) {
  const auto device = arguments[0].toTensor().device();
  replace_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    return tensor.key_set().has(kTouchKey) || tensor.dim() == 0 ? std::nullopt : std::optional(tensor.to(device));
  });
}

/// Puts what the call needs in the place of parameters, and makes the groups that it reads valid. Whether the activations beside
/// them are to be cast.
bool prepare(const OperatorTraits& traits, Arguments arguments, const Reads& reads, Use use) {
  switch (use) {
    case Use::kWritesPlaces:
    case Use::kInForward: {
      const bool shifts = traits.storage_offset && parameter_meta(arguments[0].toTensor());
      const bool casts = unshard_arguments(traits, arguments, reads, /*substitutes=*/true);
      if (shifts) shift_storage_offset(traits, arguments);
      if (use == Use::kWritesPlaces && reads.offloaded) move_to_device(traits, arguments);
      return casts;
    }
    case Use::kAmongDTensors:
      replace_tensors(traits, arguments, [](const at::Tensor& tensor, size_t) { return dtensor_leaf_of(tensor); });
      [[fallthrough]];
    case Use::kAsDTensors:
      if (traits.writes_at_indices && reads.writes_parameter && reads.offloaded) move_to_device(traits, arguments);
      return reads.leaf && !traits.is_metadata_only && unshard_arguments(traits, arguments, reads, /*substitutes=*/false);
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// `keys` of a call whose parameters lie in the host's memory, for the leaves on the device that have taken their places: the
/// kernels are the device's, and so is autocast.
c10::DispatchKeySet keys_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const OperatorTraits& traits,
                                   Arguments arguments) {
  c10::DispatchKeySet of_arguments;
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) { of_arguments = of_arguments | tensor.key_set(); });
  constexpr uint64_t backends = c10::full_backend_mask;
  keys = {c10::DispatchKeySet::RAW, (keys.raw_repr() & ~backends) | (of_arguments.raw_repr() & backends)};
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  for (const auto autocast : c10::autocast_dispatch_keyset) {
    if (of_arguments.has(autocast) && !excluded.has(autocast) && op.hasKernelForDispatchKey(autocast)) keys = keys.add(autocast);
  }
  return keys;
}

/// Autocast would keep its cast copies of whole unsharded parameters until the autocast scope ends.
void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const bool caches = keys.has_any(c10::autocast_dispatch_keyset) && at::autocast::is_autocast_cache_enabled();
  if (caches) at::autocast::set_autocast_cache_enabled(false);
  const auto restore = c10::make_scope_exit([caches] {
    if (caches) at::autocast::set_autocast_cache_enabled(true);
  });
  op.redispatchBoxed(keys, stack);
}

/// Whether a forward makes the call, in a backward perhaps, and no derivative formula.
bool runs_forward() { return !in_backward() || in_second_run() || dispatch::in_nested_forward(); }

void on_touch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& traits = traits_of(op);
  const auto arguments = Arguments(*stack).last(traits.arguments.size());
  check_keeps_parameters(op, traits, arguments);
  Reads reads = scan(traits, arguments);
  if (C10_UNLIKELY(reads.unreduced)) return run_on_unreduced(op, traits, stack);
  if (traits.special == Special::kConverts && converts_nothing(op, arguments))
    return stack->resize(stack->size() - arguments.size() + 1);
  if (is_constructing_on_meta()) replace_device_with_meta(op.schema(), stack);

  const Use use = classify(traits, reads);
  const bool is_whole = use == Use::kInForward || use == Use::kWritesPlaces;
  c10::IValue written; // by kWritesPlaces, and returned
  if (use == Use::kWritesPlaces) written = arguments[0];
  const bool casts = prepare(traits, arguments, reads, use);
  // Redispatch, never exclude: composites must still see the leaf's key inside.
  auto after = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
  if (is_whole && !reads.computed && !reads.constant && !KeptResults::Scope::active()) after = after.remove(kDTensorKey);
  if (is_whole && reads.offloaded) after = keys_on_device(op, after, traits, arguments);
  if (is_whole || (reads.leaf && !reads.other_dtensor)) end_view_replay(); // a plain computation goes on
  if (casts && runs_forward()) cast_activations(op, traits, arguments);
  redispatch(op, after, stack);
  end_view_replay(); // autograd has asked
  if (use == Use::kWritesPlaces) {
    const auto* meta = parameter_meta(written.toTensor());
    reads.written_unsharded.emplace_back(meta->group, UnshardedRange::of(meta->group->parameters()[meta->index].leaf));
    stack->back() = written;
  }
  for (const auto& [group, range] : reads.written_unsharded) schedule_of(*group).write_back(*group, range);
}

} // namespace

// Recurrent modules ask it in Module::to, before they lay their weights out anew: a sharded parameter stays as it is, and is not
// gathered for the question.
TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("cudnn_is_acceptable", [](const at::Tensor&) { return false; });
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_touch>()); }

} // namespace tessera::internal
