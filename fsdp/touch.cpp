// The dispatch above autograd that stands in for FSDP2's module hooks: it sees every op that reads a sharded parameter, its
// unsharded leaf, or a view of the leaf, and makes the group's unsharded parameters valid first.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <typeinfo>
#include <vector>

#include <tessera/dtensor/view_replay.h>
#include <tessera/fsdp/construction_mode.h>
#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/operator_traits.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/schedule.h>
#include <tessera/fsdp/sharded_module.h>
#include <tessera/fsdp/unsharded.h>

namespace tessera::fsdp_internal {

namespace {

using torch::jit::Stack;

/// The arguments of one call, on the stack.
class Arguments {
 public:
  Arguments(const OperatorTraits& traits, size_t count, Stack& stack)
      : traits_(traits), stack_(stack), begin_(stack.size() - count) {}

  template <typename Visit> // void(const at::Tensor&, const TensorArgument&)
  void visit(const Visit& visit_tensor) const {
    for (const auto& argument : traits_.tensors) {
      const c10::IValue& value = stack_[begin_ + argument.index];
      if (value.isTensor()) {
        visit_tensor(value.toTensor(), argument);
      } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef()) {
          if (element.isTensor()) visit_tensor(element.toTensor(), argument);
        }
      }
    }
  }

  template <typename Replace> // std::optional<at::Tensor>(const at::Tensor&, const TensorArgument&)
  void replace(const Replace& replacement) {
    for (const auto& argument : traits_.tensors) {
      c10::IValue& value = stack_[begin_ + argument.index];
      if (value.isTensor()) {
        if (auto tensor = replacement(value.toTensor(), argument)) value = std::move(*tensor);
      } else if (value.isList()) {
        replace_in_list(value, argument, replacement);
      }
    }
  }

 private:
  template <typename Replace>
  static void replace_in_list(c10::IValue& value, const TensorArgument& argument, const Replace& replacement) {
    std::optional<c10::List<c10::IValue>> copy;
    const auto elements = value.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (!elements[i].isTensor()) continue;
      auto tensor = replacement(elements[i].toTensor(), argument);
      if (!tensor) continue;
      if (!copy) copy = value.toList().copy();
      copy->set(i, std::move(*tensor));
    }
    if (copy) value = *copy;
  }

  const OperatorTraits& traits_;
  Stack& stack_;
  size_t begin_;
};

/// What a call does with sharded parameters and their leaves.
struct Reads {
  bool parameter = false; ///< a sharded parameter is among the arguments
  bool writes_parameter = false;
  bool plain = false; ///< … and a plain tensor that is no scalar
  bool other_dtensor = false;
  bool leaf = false;
  ParameterGroup* written_leaf = nullptr;
};

ParameterGroup& group_of_leaf(const at::Tensor& leaf) {
  auto* storage = unsharded_storage(leaf);
  TORCH_CHECK(storage && storage->group(), "an unsharded parameter was read after its module was destroyed");
  return *storage->group();
}

/// Looks at the arguments; parameters that the call writes are noted as changed.
Reads scan(const OperatorTraits& traits, const Arguments& arguments) {
  Reads reads;
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument& argument) {
    if (!tensor.defined()) return;
    const auto keys = tensor.key_set();
    if (keys.has(kTouchKey)) {
      if (const auto* meta = parameter_meta(tensor)) {
        reads.parameter = true;
        if (argument.is_written) {
          reads.writes_parameter = true;
          if (!traits.is_metadata_only) meta->group->note_write(tensor, meta->index);
        }
      } else if (keys.has(kDTensorKey)) {
        reads.other_dtensor = true; // a detached copy that outlived its group
      } else {
        reads.leaf = true;
        if (argument.is_written) reads.written_leaf = &group_of_leaf(tensor);
      }
    } else if (keys.has(kDTensorKey)) {
      reads.other_dtensor = true;
    } else {
      reads.plain = reads.plain || tensor.dim() > 0;
    }
  });
  return reads;
}

/// In the backward of a torch::autograd::Function, where grad mode is off and what is saved is read as in its forward.
bool in_custom_backward() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const auto& type = *node;
  return std::strstr(typeid(type).name(), "7CppNode") != nullptr; // a template over the user's class: no cast can ask for it
}

/// Optimizers, initializers, clipping and state dicts act on the parameter as a DTensor; what else reads it is a use in forward.
/// Without grad mode only an op that mixes it with plain tensors or returns a view of it (`weight.t()`) is, or any op in the
/// backward of a torch::autograd::Function.
bool is_forward_read(const OperatorTraits& traits, const Reads& reads) {
  if (traits.is_metadata_only || reads.writes_parameter || reads.other_dtensor) return false;
  return at::GradMode::is_enabled() || reads.plain || reads.leaf || traits.returns_alias || in_custom_backward();
}

/// A parameter among other DTensors in grad mode: `(p - p0).square()` with a sharded copy `p0`.
std::optional<at::Tensor> dtensor_leaf_of(const at::Tensor& tensor) {
  auto* meta = parameter_meta(tensor);
  if (!meta || !tensor.requires_grad()) return std::nullopt;
  auto& parameter = meta->group->parameters()[meta->index];
  if (!parameter.dtensor_leaf.defined())
    parameter.dtensor_leaf = make_dtensor_leaf(tensor, meta->group->weak_from_this(), meta->index);
  return parameter.dtensor_leaf;
}

/// Casts the floating-point activations beside a leaf to its dtype, where the policy wants it (FSDP2: cast_forward_inputs).
void cast_activations(Arguments& arguments) {
  std::optional<at::ScalarType> dtype;
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument&) {
    if (dtype || !tensor.defined() || !tensor.key_set().has(kTouchKey) || tensor.key_set().has(kDTensorKey)) return;
    const auto& policy = group_of_leaf(tensor).options().mixed_precision;
    if (policy.param_dtype && policy.cast_forward_inputs && tensor.is_floating_point()) dtype = policy.param_dtype;
  });
  if (!dtype) return;
  arguments.replace([&](const at::Tensor& tensor, const TensorArgument& argument) -> std::optional<at::Tensor> {
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == *dtype || tensor.dim() == 0)
      return std::nullopt;
    if (argument.is_written || argument.keeps_dtype || tensor.key_set().has(kTouchKey)) return std::nullopt;
    return tensor.to(*dtype);
  });
}

/// Autocast would keep its cast copies of whole unsharded parameters until the autocast scope ends.
class AutocastCacheOff {
 public:
  AutocastCacheOff() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastCacheOff() { at::autocast::set_autocast_cache_enabled(was_enabled_); }
  AutocastCacheOff(const AutocastCacheOff&) = delete;
  AutocastCacheOff& operator=(const AutocastCacheOff&) = delete;

 private:
  bool was_enabled_;
};

void check_keeps_data(const Arguments& arguments) {
  const c10::TensorImpl* first = nullptr;
  bool same = true; // Module::to a device or dtype that the parameter has already
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument&) {
    same = same && (!first || first == tensor.unsafeGetTensorImpl());
    first = tensor.unsafeGetTensorImpl();
  });
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument&) {
    const auto* meta = parameter_meta(tensor);
    TORCH_CHECK(same || !meta, "set_data on the sharded parameter ", meta->group->full_name(meta->index),
                " would unshard it (Module::to does this): choose dtype and device before fully_shard, or use "
                "parameter.copy_(full_tensor) for values");
  });
}

using GroupsRead = absl::InlinedVector<ParameterGroup*, 4>;

/// The groups whose parameters a call reads.
GroupsRead groups_read(const Arguments& arguments) {
  GroupsRead groups;
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument&) {
    if (!tensor.defined() || !tensor.key_set().has(kTouchKey)) return;
    const auto* meta = parameter_meta(tensor);
    if (!meta && tensor.key_set().has(kDTensorKey)) return;
    auto* group = meta ? meta->group : &group_of_leaf(tensor);
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  });
  return groups;
}

/// Puts the unsharded leaves in the place of parameters, and makes those and the leaves among the arguments valid.
void unshard_arguments(Arguments& arguments, const Reads& reads, bool substitutes) {
  const auto groups = groups_read(arguments);
  std::optional<Schedule::KeepOpen> keep;
  if (groups.size() > 1) keep.emplace(schedule_of(*groups[0]), std::vector<ParameterGroup*>(groups.begin(), groups.end()));
  if (substitutes) {
    arguments.replace([](const at::Tensor& tensor, const TensorArgument&) -> std::optional<at::Tensor> {
      if (!parameter_meta(tensor)) return std::nullopt;
      return unsharded(tensor);
    });
  }
  if (!reads.leaf) return;
  for (auto* group : groups) schedule_of(*group).touch(*group);
}

/// Whether `Tensor::to` would return the parameter itself, asked of a stand-in; Module::to must not unshard it then.
bool converts_nothing(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  const auto* meta = parameter_meta(stack[begin].toTensor());
  if (!meta) return false;
  const auto& parameter = meta->group->parameters()[meta->index];
  if (!parameter.leaf.defined() || parameter.leaf.scalar_type() != parameter.spec->dtype()) return false;
  const auto stand_in = at::empty({0}, parameter.leaf.options().requires_grad(false));
  Stack call(stack.begin() + static_cast<std::ptrdiff_t>(begin), stack.end());
  call[0] = stand_in;
  op.callBoxed(&call);
  return call[0].toTensor().is_same(stand_in);
}

void check_is_no_load(const Arguments& arguments) {
  arguments.visit([](const at::Tensor& tensor, const TensorArgument&) {
    const auto* meta = parameter_meta(tensor);
    TORCH_CHECK(!meta, "set_ on the sharded parameter ", meta->group->full_name(meta->index),
                " would unshard it (torch::load does this): load with tessera::checkpoint::load, or into the module before "
                "fully_shard");
  });
}

void check_is_no_renormalization(const Arguments& arguments) {
  arguments.visit([](const at::Tensor& tensor, const TensorArgument&) {
    const auto* meta = parameter_meta(tensor);
    TORCH_CHECK(
        !meta, "the embedding ", meta->group->full_name(meta->index),
        " has a max_norm, which rewrites the rows that this rank's batch reads, and no other rank's copy of them: build it "
        "without max_norm, and rescale the weight between steps");
  });
}

/// The sharded parameter that `tensor` is, or stands for unsharded; null for any other tensor, as for a view of these.
const ShardedParameter* parameter_of(const at::Tensor& tensor) {
  if (const auto* meta = parameter_meta(tensor)) return &meta->group->parameters()[meta->index];
  if (!tensor.defined() || !tensor.key_set().has(kTouchKey) || tensor.key_set().has(kDTensorKey)) return nullptr;
  for (const auto& parameter : group_of_leaf(tensor).parameters()) {
    if (tensor.is_same(parameter.leaf) || tensor.is_same(parameter.detached_leaf)) return &parameter;
  }
  return nullptr;
}

void check_keeps_shape(const c10::OperatorHandle& op, const Arguments& arguments) {
  arguments.visit([&](const at::Tensor& tensor, const TensorArgument& argument) {
    const auto* parameter = argument.is_written ? parameter_of(tensor) : nullptr;
    TORCH_CHECK(
        !parameter, op.schema().name(), " on the sharded parameter ", parameter->name,
        " would change its shape, and its group keeps the one that it was sharded with: reshape it before fully_shard, or "
        "use the operator that is not in place");
  });
}

void on_touch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& traits = traits_of(op);
  const size_t count = op.schema().arguments().size();
  Arguments arguments(traits, count, *stack);
  if (traits.reshapes) check_keeps_shape(op, arguments); // before `scan` notes a write
  const Reads reads = scan(traits, arguments);
  if (traits.converts && converts_nothing(op, *stack, stack->size() - count)) {
    stack->resize(stack->size() - count + 1); // the parameter
    return;
  }
  if (traits.replaces_data) check_keeps_data(arguments);
  if (traits.replaces_storage) check_is_no_load(arguments);
  if (traits.renormalizes) check_is_no_renormalization(arguments);
  if (is_constructing_on_meta()) replace_device_with_meta(op.schema(), stack);

  // Redispatch, never exclude: composites must still see the leaf's key inside.
  auto after = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
  const bool substitute = reads.parameter && is_forward_read(traits, reads);
  if (substitute || (reads.leaf && !traits.is_metadata_only)) unshard_arguments(arguments, reads, substitute);
  if (substitute || (reads.leaf && !reads.other_dtensor)) set_view_replay(false); // a plain computation goes on
  if (substitute) {
    after = after.remove(kDTensorKey);
  } else if (reads.parameter && reads.other_dtensor && !reads.writes_parameter && at::GradMode::is_enabled()) {
    arguments.replace([](const at::Tensor& tensor, const TensorArgument&) { return dtensor_leaf_of(tensor); });
  }
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if ((substitute || reads.leaf) && (!in_backward || at::GradMode::is_enabled())) cast_activations(arguments);
  {
    std::optional<AutocastCacheOff> cache_off;
    if (keys.has_any(c10::autocast_dispatch_keyset)) cache_off.emplace();
    op.redispatchBoxed(after, stack);
  }
  if (reads.written_leaf && !in_backward) schedule_of(*reads.written_leaf).write_back(*reads.written_leaf);
}

} // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_touch>()); }

} // namespace tessera::fsdp_internal
