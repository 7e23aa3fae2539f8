#include <tessera/fsdp/schedule/graph_task.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <tessera/dtensor/calls/call_site.h>
#include <tessera/dtensor/tensor/in_backward.h>

namespace tessera::internal {

void run_empty_backward(const std::function<void()>& event) {
  const at::AutoGradMode grad_mode(true);
  const auto leaf = at::zeros({}, at::kFloat).set_requires_grad(true);
  const auto output = leaf.clone();
  output.register_hook([&](const at::Tensor&) { event(); });
  torch::autograd::backward({output}, {at::zeros({}, at::kFloat)});
}

bool is_in_graph_task(torch::autograd::Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes || nodes->count(node) == 0) return false;
  const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
  if (!inputs || inputs->empty()) return true;
  const auto found = inputs->find(node);
  return found != inputs->end() && found->second.should_execute();
}

bool is_forward_in_hook(const ParameterGroup& group) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  // The gradients of what a recompute reads come at once.
  if (!nodes || !dispatch::in_nested_forward() || dispatch::in_custom_backward()) return false;
  bool trains = false;
  for (const auto& parameter : group.parameters()) {
    if (!is_trained(parameter)) continue;
    trains = true;
    if (nodes->count(parameter.accumulator.get()) > 0) return false;
  }
  return trains;
}

bool is_read_in_both_ways(const ShardedParameter& parameter) {
  if (!parameter.other_leaves.among_dtensors.defined() || !parameter.accumulator) return false;
  const auto sharded = torch::autograd::impl::try_get_grad_accumulator(parameter.other_leaves.among_dtensors);
  return sharded && is_in_graph_task(sharded.get()) && is_in_graph_task(parameter.accumulator.get());
}

} // namespace tessera::internal
