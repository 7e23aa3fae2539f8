#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>

#include <tessera/collectives/communicator.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/parallel/pipeline_stages.h>

namespace tessera {

namespace {

/// The norm of all stages, of this rank's and in float or double as that. Infinite norms are extremes, and the norm 0 is a count.
at::Tensor over_stages(const PipelineStages& stages, const at::Tensor& own, double type) {
  const bool is_extreme = std::isinf(type), is_count = type == 0;
  auto value = own.to(at::kDouble).reshape({1});
  if (!is_extreme && !is_count) value = value.pow(type);
  const auto op = !is_extreme ? ReduceOp::kSum : type > 0 ? ReduceOp::kMax : ReduceOp::kMin;
  stages.mesh.communicator(0, "pipeline")->all_reduce(value, op, "clip_grad_norm_ over the stages").wait();
  if (!is_extreme && !is_count) value = value.pow(1 / type);
  return value.reshape({}).to(own.scalar_type());
}

} // namespace

at::Tensor clip_grad_norm_(const PipelineStages& stages, double max_norm, double norm_type, bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients, parameters;
  for (const auto& item : stages.module->named_parameters()) {
    parameters.push_back(item.value());
    if (item.value().grad().defined() && !stages.is_copy(item.key())) gradients.push_back(item.value().grad());
  }
  auto own = get_total_norm(gradients, norm_type);
  if (gradients.empty()) own = at::Tensor(own.to(stages.mesh.device())).fill_(norm_type < 0 ? INFINITY : 0.0);
  const auto total = over_stages(stages, own, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total.item<double>()), "the ", norm_type,
              "-norm of the gradients of all stages is ", total.item<double>(), ", so it cannot be clipped");
  clip_grads_with_norm_(parameters, max_norm, total);
  return total;
}

} // namespace tessera
