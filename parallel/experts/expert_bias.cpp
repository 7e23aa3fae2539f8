#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include <tessera/collectives/process_context.h>
#include <tessera/parallel/moe.h>

namespace tessera {

namespace {

/// Adds the counts of layers, one after another, over the ranks of a mesh.
at::Tensor sum_over(const std::vector<at::Tensor>& counts, const DeviceMesh& mesh) {
  auto sums = at::cat(counts);
  if (!mesh.defined() || mesh.size() == 1) return sums;
  sums = sums.to(mesh.device());
  const auto communicator = process_context().communicator(mesh.rank_list(), mesh.device_type(), "experts.counts");
  communicator->all_reduce(sums, ReduceOp::kSum, "update_expert_bias").wait();
  return sums;
}

} // namespace

void update_expert_bias(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  auto layers = moe_layers(module);
  std::erase_if(layers, [](const auto* layer) { return !layer->router_->bias.defined(); });
  for (const auto* layer : layers) layer->check_knows_ranks("a balancing bias");
  while (!layers.empty()) {
    const auto mesh = layers.front()->token_ranks();
    const auto is_of_mesh = [&](const auto* layer) { return layer->token_ranks() == mesh; };
    const auto others = std::stable_partition(layers.begin(), layers.end(), is_of_mesh);
    std::vector<at::Tensor> counts;
    for (auto layer = layers.begin(); layer != others; ++layer) {
      auto& chosen = (*layer)->chosen_;
      if (!chosen.defined()) chosen = at::zeros({(*layer)->options_.experts}, (*layer)->router_->bias.options().dtype(at::kLong));
      counts.push_back(chosen);
    }
    const auto sums = sum_over(counts, mesh).to(at::kDouble);
    int64_t first = 0;
    for (auto layer = layers.begin(); layer != others; ++layer) {
      const auto& bias = (*layer)->router_->bias;
      const auto of_layer = sums.narrow(0, first, bias.numel());
      const auto step = at::sign(of_layer.mean() - of_layer);
      at::Tensor(bias).add_(((step - step.mean()) * (*layer)->options_.bias_rate).to(bias.scalar_type()));
      (*layer)->chosen_ = at::Tensor();
      first += bias.numel();
    }
    layers.erase(layers.begin(), others);
  }
}

} // namespace tessera
