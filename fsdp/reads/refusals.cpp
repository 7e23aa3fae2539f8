#include <tessera/fsdp/reads/refusals.h>

#include <ATen/core/Tensor.h>

#include <string>

#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

ParameterGroup& group_of_leaf(const at::Tensor& leaf) {
  auto* storage = unsharded_storage(leaf);
  TORCH_CHECK(storage && storage->group(),
              "an unsharded parameter is read whose group is gone: its module was destroyed, or tessera::reshard_parameters made "
              "another group since the forward that read it. Run the forward again");
  return *storage->group();
}

namespace {

using dispatch::visit_tensors;

/// An error of the text `before`, its name and `after` for each sharded parameter among the arguments.
void check_no_parameter(const OperatorTraits& traits, std::span<c10::IValue> arguments, const char* before, const char* after) {
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
    if (tensor.is_same(parameter.leaf) || tensor.is_same(parameter.other_leaves.frozen)) return &parameter;
  }
  return nullptr;
}

void check_keeps_shape(const c10::OperatorHandle& op, const OperatorTraits& traits, std::span<c10::IValue> arguments) {
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
    const auto* parameter = traits.arguments[argument].written ? parameter_of(tensor) : nullptr;
    TORCH_CHECK(
        !parameter, op.schema().name(), " on the sharded parameter ", parameter->meta->group->full_name(parameter->meta->index),
        " would change its shape, and its group keeps the one that it was sharded with: reshape it before fully_shard, or "
        "use the operator that is not in place");
  });
}

} // namespace

void check_keeps_parameters(const c10::OperatorHandle& op, const OperatorTraits& traits, std::span<c10::IValue> arguments) {
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

void throw_read_by_optimized_script(const OperatorTraits& traits, std::span<c10::IValue> arguments) {
  std::string name;
  visit_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = name.empty() ? parameter_meta(tensor) : nullptr;
    if (meta) name = "the sharded parameter " + meta->group->full_name(meta->index);
  });
  if (name.empty()) name = "a view of a sharded parameter";
  TORCH_CHECK(false, name,
              " is read by TorchScript on a thread whose executor optimizes, which differentiates by itself and "
              "would compute other gradients: run the script through a tessera::ScriptModule, or open a tessera::PlainExecutor "
              "on this thread around the forward (the setting of torch::jit::setGraphExecutorOptimize(false) is one of each "
              "thread; functions that a script starts with torch.jit.fork run on threads that have no such scope)");
}

} // namespace tessera::internal
