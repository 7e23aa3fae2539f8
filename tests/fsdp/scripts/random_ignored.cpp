#include "random_ignored.h"

#include <tessera/collectives/process_context.h>
#include <tessera/training/metrics.h>

#include <tessera/tests/fsdp/scripts/random_optimizer.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {
namespace {

Tensor mean_over_ranks(const Tensor& gradient, const DeviceMesh& mesh) {
  if (gradient.is_complex()) return torch::view_as_complex(all_reduce(torch::view_as_real(gradient), mesh, ReduceOp::kAvg));
  return all_reduce(gradient, mesh, ReduceOp::kAvg);
}

} // namespace

std::vector<Tensor> ignore_at_random(RandomModel& model, Draw& draw) {
  std::vector<Tensor> ignored;
  const bool ignores = draw.chance(12);
  const auto mesh = init_device_mesh(test_device_type(), {process_context().world_size()});
  for (auto& parameter : distinct(model.parameters())) {
    const bool chosen = draw.chance(30) && ignores;
    const bool can_be = parameter.requires_grad() && !parameter.is_meta() && !parameter.is_same(model.head());
    if (!chosen || !can_be) continue;
    const torch::NoGradGuard no_grad;
    parameter.set_data(parameter.to(test_device()));
    parameter.register_hook([mesh](const Tensor& gradient) { return mean_over_ranks(gradient, mesh); });
    ignored.push_back(parameter);
  }
  return ignored;
}

} // namespace tessera::testing::scripts
