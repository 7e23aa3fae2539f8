#include <tessera/parallel/run/tie_sums.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>

namespace tessera::internal::pipeline {

TieSums::TieSums(const PipelineStages& stages) {
  const auto parameters = stages.module->named_parameters();
  for (const auto& tie : stages.ties) {
    if (tie.ranks.size() == 1 || std::count(tie.ranks.begin(), tie.ranks.end(), stages.rank()) == 0) continue;
    std::vector<int64_t> ranks;
    for (const auto rank : tie.ranks) ranks.push_back(stages.mesh.ranks()[static_cast<size_t>(rank)]);
    ties_.push_back(
        {tie.name, parameters[tie.name], process_context().communicator(ranks, stages.mesh.device_type(), "pipeline ties")});
  }
}

void TieSums::begin() {
  if (std::exchange(has_begun_, true)) return;
  for (auto& tie : ties_) tie.aside = std::exchange(tie.parameter.mutable_grad(), at::Tensor());
}

void TieSums::sum() {
  const at::NoGradGuard no_grad;
  has_begun_ = false;
  for (auto& tie : ties_) {
    if (!tie.parameter.requires_grad()) continue;
    auto& gradient = tie.parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(tie.parameter);
    const auto local = is_dtensor(gradient) ? DTensor(gradient).local() : gradient;
    const auto flat = local.contiguous();
    tie.communicator->all_reduce(flat.view({-1}), ReduceOp::kSum, "the tied weight " + tie.name).wait();
    if (!flat.is_same(local)) local.copy_(flat);
    if (tie.aside.defined()) gradient.add_(std::exchange(tie.aside, at::Tensor()));
  }
}

} // namespace tessera::internal::pipeline
