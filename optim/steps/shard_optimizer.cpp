#include <tessera/optim/shard_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/optimizer_class.h>

namespace tessera::internal {

namespace {

/// This rank's part of `whole`, laid out as `layout` says beside `parameter`, and where its part lies.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& parameter, StateLayout layout) {
  const auto& spec = *dtensor_meta(parameter)->spec;
  const auto replicated =
      from_local(whole.to(spec.mesh().device()), spec.mesh(), Placements(static_cast<size_t>(spec.mesh().ndim()), Replicate{}));
  const at::Tensor part = layout == StateLayout::kAsParameter ? replicated.redistribute(spec.placements()) : replicated;
  const auto& meta = *dtensor_meta(part);
  return meta.local.device() == parameter.device() ? part : make_dtensor(meta.local.to(parameter.device()), meta.spec);
}

struct FieldPlace {
  size_t group, parameter;
};

void shard_field(const TensorField& field, torch::optim::OptimizerParamState& state, const at::Tensor& parameter,
                 FieldPlace place) {
  if (field.layout == StateLayout::kPlain) return;
  auto tensors = field.get(state);
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    const auto& spec = *dtensor_meta(parameter)->spec;
    if (const auto* meta = dtensor_meta(tensor)) {
      const bool moves = field.layout == StateLayout::kAsParameter && meta->spec->placements() != spec.placements();
      if (moves && meta->spec->mesh() == spec.mesh()) tensor = DTensor(tensor).redistribute(spec.placements());
      continue;
    }
    TORCH_CHECK_VALUE(field.layout != StateLayout::kByRank, "shard_optimizer: ", field.name, " of parameter ", place.parameter,
                      " in group ", place.group, " is of one rank alone: shard the model before the optimizer steps");
    TORCH_CHECK_VALUE(field.layout != StateLayout::kAsParameter || tensor.sizes() == parameter.sizes(),
                      "shard_optimizer: ", field.name, " of parameter ", place.parameter, " in group ", place.group,
                      " has shape ", tensor.sizes(), ", but the parameter has ", parameter.sizes());
    tensor = part_of(tensor, parameter, field.layout);
  }
  field.set(state, tensors);
}

} // namespace

} // namespace tessera::internal

namespace tessera {

void shard_optimizer(torch::optim::Optimizer& optimizer) {
  if (optimizer.state().empty()) return;
  const at::NoGradGuard no_grad;
  const auto& description = internal::class_of(optimizer);
  size_t group_number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto& parameter = group.params()[i];
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!internal::dtensor_meta(parameter) || found == optimizer.state().end()) continue;
      for (const auto& field : description.tensors) internal::shard_field(field, *found->second, parameter, {group_number, i});
    }
    ++group_number;
  }
}

} // namespace tessera
