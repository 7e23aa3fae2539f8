#include <tessera/parallel/backward/split_backward.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include <tessera/activations/keep_brought_back.h>
#include <tessera/base/per_thread.h>

namespace tessera::internal::pipeline {

using torch::autograd::Edge, torch::autograd::Node, torch::autograd::variable_list;

namespace {

// What `linear`, `matmul` and recurrent cells end in, lookups, and the layers of several experts.
constexpr std::array kSplitOps{"mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "_grouped_mm"};
// Nodes of views and casts. They save no tensors, so that they may run in both halves.
constexpr std::array<std::string_view, 15> kThroughWeights{"TBackward0",       "TransposeBackward0",  "TransposeBackward1",
                                                           "ViewBackward0",    "UnsafeViewBackward0", "ReshapeAliasBackward0",
                                                           "PermuteBackward0", "ToCopyBackward0",     "AliasBackward0",
                                                           "SliceBackward0",   "SelectBackward0",     "UnsqueezeBackward0",
                                                           "SqueezeBackward1", "ExpandBackward0",     "UnbindBackward0"};

// The same of DTensors, as their class ends in the names of nodes.
constexpr std::array<std::string_view, 2> kThroughDTensors{"::ToLocal>", "::FromLocal>"};

constinit PerThread<WeightQueuePtr> queue_here; // null: no backward is to be split

bool goes_through(const std::string& name) {
  const auto is_end = [&](std::string_view end) { return name.ends_with(end); };
  return std::find(kThroughWeights.begin(), kThroughWeights.end(), name) != kThroughWeights.end() ||
         std::any_of(kThroughDTensors.begin(), kThroughDTensors.end(), is_end);
}

bool leads_to_weights(const Edge& edge) {
  const auto* node = edge.function.get();
  while (node != nullptr) {
    if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) return true;
    if (node->num_outputs() != 1 || !goes_through(node->name())) return false;
    node = node->next_edge(0).function.get();
  }
  return false;
}

template <typename T, typename... Arguments>
std::shared_ptr<T> make_node(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

/// It stands for the node of an op until that has run in both halves.
class SplitNode final : public Node {
 public:
  SplitNode(std::shared_ptr<Node> own, const std::vector<bool>& to_weight, WeightQueuePtr queue)
      : Node(own->sequence_nr(), without(*own, to_weight)), own_(std::move(own)), queue_(std::move(queue)) {
    for (uint32_t i = 0; i < to_weight.size(); ++i) {
      weight_edges_.push_back(to_weight[i] ? own_->next_edge(i) : Edge());
      own_->set_next_edge(i, Edge()); // so that it does not hold the graph below
    }
    queue_->expect();
  }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(
        own_ && !torch::autograd::get_current_graph_task_keep_graph() && !at::GradMode::is_enabled(), name(),
        ": where a schedule splits the backward, a graph has one backward, and no double one (retain_graph, create_graph)");
    variable_list results(num_outputs());
    if (!gradients[0].defined()) return results;
    const at::Tensor gradient = gradients[0];
    for (uint32_t i = 0; i < num_outputs(); ++i) own_->set_next_edge(i, next_edge(i));
    const bool any = std::any_of(next_edges().begin(), next_edges().end(), [](const Edge& edge) { return edge.is_valid(); });
    if (any) {
      const KeepBroughtBack keep; // for the second half
      results = (*own_)(std::move(gradients));
    }
    for (uint32_t i = 0; i < num_outputs(); ++i) own_->set_next_edge(i, std::move(weight_edges_[i]));
    queue_->add(make_node<WeightNode>(std::move(own_), gradient));
    return results;
  }
  void release_variables() override { own_ = nullptr; }
  std::string name() const override { return "SplitBackward"; }
  const torch::autograd::edge_list& weight_edges() const { return weight_edges_; }

 private:
  static torch::autograd::edge_list without(const Node& own, const std::vector<bool>& to_weight) {
    torch::autograd::edge_list edges;
    for (uint32_t i = 0; i < to_weight.size(); ++i) edges.push_back(to_weight[i] ? Edge() : own.next_edge(i));
    return edges;
  }

  std::shared_ptr<Node> own_;
  WeightQueuePtr queue_;
  torch::autograd::edge_list weight_edges_;
};

void seen(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSplitKey), stack);
  const auto& queue = *queue_here;
  if (!queue || !at::GradMode::is_enabled()) return;
  const auto& out = stack->back().toTensor();
  const auto own = out.grad_fn();
  if (!own) return;
  std::vector<bool> to_weight;
  for (const auto& edge : own->next_edges()) to_weight.push_back(leads_to_weights(edge));
  if (std::find(to_weight.begin(), to_weight.end(), true) == to_weight.end()) return;
  auto split = make_node<SplitNode>(own, to_weight, queue);
  split->add_input_metadata(out);
  torch::autograd::impl::set_gradient_edge(out, Edge(std::move(split), 0));
}

} // namespace

std::vector<Edge> weight_edges(const Node& node) {
  const auto* const split = dynamic_cast<const SplitNode*>(&node);
  return split != nullptr ? split->weight_edges() : std::vector<Edge>();
}

SplitBackward::SplitBackward(WeightQueuePtr queue) : queue_(*queue_here, std::move(queue)), include_(kSplitKey) {}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  for (const auto* name : kSplitOps) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&seen>());
}

TORCH_LIBRARY_IMPL(tessera, TESTING_ONLY_GenericWrapper, m) {
  m.impl("float8_product", torch::CppFunction::makeFromBoxedFunction<&seen>()); // of nn/float8_linear.cpp
}

} // namespace tessera::internal::pipeline
