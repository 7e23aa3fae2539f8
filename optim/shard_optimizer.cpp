#include <tessera/optim/shard_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/optim/state_fields.h>

namespace tessera {

namespace {

/// This rank's part of `whole`, laid out as `spec` says.
at::Tensor part_of(const at::Tensor& whole, const Spec& spec) {
  const auto replicated =
      from_local(whole.to(spec.mesh().device()), spec.mesh(), Placements(static_cast<size_t>(spec.mesh().ndim()), Replicate{}));
  return replicated.redistribute(spec.placements());
}

} // namespace

void shard_optimizer(torch::optim::Optimizer& optimizer) {
  if (optimizer.state().empty()) return;
  const at::NoGradGuard no_grad;
  const auto& fields = state_fields_of(optimizer);
  size_t group_number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto& parameter = group.params()[i];
      const auto* meta = dtensor_meta(parameter);
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!meta || found == optimizer.state().end()) continue;
      for (const auto& field : fields.tensors) {
        auto& tensor = field.access(*found->second);
        if (!tensor.defined() || dtensor_meta(tensor)) continue;
        TORCH_CHECK_VALUE(tensor.sizes() == parameter.sizes(), "shard_optimizer: ", field.name, " of parameter ", i, " in group ",
                          group_number, " has shape ", tensor.sizes(), ", but the parameter has ", parameter.sizes());
        tensor = part_of(tensor, *meta->spec);
      }
    }
    ++group_number;
  }
}

} // namespace tessera
