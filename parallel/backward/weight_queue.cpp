#include <tessera/parallel/backward/weight_queue.h>

#include <torch/csrc/autograd/engine.h>

#include <utility>

namespace tessera::internal::pipeline {

using torch::autograd::Edge, torch::autograd::variable_list;

WeightNode::WeightNode(std::shared_ptr<torch::autograd::Node> own, at::Tensor gradient)
    : Node(own->sequence_nr(), torch::autograd::edge_list(own->next_edges())),
      own_(std::move(own)),
      gradient_(std::move(gradient)),
      signal_(gradient_.new_empty({0})) {
  add_input_metadata(signal_); // its device is the node's
}

variable_list WeightNode::apply(variable_list&& /*unused*/) {
  const auto own = std::exchange(own_, nullptr);
  return (*own)({std::exchange(gradient_, at::Tensor())});
}

void WeightQueue::run() {
  expected_ = 0;
  if (nodes_.empty()) return;
  torch::autograd::edge_list roots;
  variable_list signals;
  for (auto& each : std::exchange(nodes_, {})) {
    signals.push_back(each->signal());
    roots.emplace_back(std::move(each), 0);
  }
  torch::autograd::Engine::get_default_engine().execute(roots, signals, /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, {});
}

} // namespace tessera::internal::pipeline
