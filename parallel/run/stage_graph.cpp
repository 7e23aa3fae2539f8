#include <tessera/parallel/run/stage_graph.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include <tessera/collectives/process_context.h>
#include <tessera/parallel/backward/split_backward.h>
#include <tessera/parallel/stages/foreign.h>

namespace tessera::internal::pipeline {

using torch::autograd::Edge, torch::autograd::Node;

ParameterNodes::ParameterNodes(const PipelineStages& stages) : stages_(stages) {
  for (const auto& stage : stages.local) {
    for (const auto& item : stage.module->named_parameters()) {
      if (!item.value().requires_grad()) continue;
      auto node = torch::autograd::impl::grad_accumulator(item.value());
      auto& owner = owners_[node.get()];
      if (owner.name.empty()) owner.name = item.key();
      owner.stages.push_back(stage.index);
      owner.node = std::move(node);
    }
  }
}

void ParameterNodes::check_is_of(const Node* node, int64_t stage) const {
  const auto found = owners_.find(node);
  if (found == owners_.end()) return;
  const auto& [name, stages, owner] = found->second;
  TORCH_CHECK(std::count(stages.begin(), stages.end(), stage) > 0, "rank ", process_context().rank(), ": ",
              foreign_read(name, stages_.describe(stages[0]), stages_.describe(stage)));
}

std::vector<std::string> ParameterNodes::reached(const std::vector<Edge>& outputs, int64_t stage) const {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) left.push_back(edge.function.get());
  };
  const auto follow = [&] {
    while (!left.empty()) {
      const auto* node = left.back();
      left.pop_back();
      check_is_of(node, stage);
      for (const auto& edge : node->next_edges()) visit(edge);
    }
  };
  for (const auto& edge : outputs) visit(edge);
  follow();
  std::vector<std::string> names;
  for (const auto& [node, owner] : owners_) {
    if (seen.contains(node)) names.push_back(owner.name);
  }
  const auto first_half = seen;
  for (const auto* node : first_half) {
    for (const auto& edge : weight_edges(*node)) visit(edge);
  }
  follow();
  return names;
}

} // namespace tessera::internal::pipeline
