#include <tessera/parallel/run/stage_run.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/parallel/backward/split_backward.h>
#include <tessera/parallel/stages/foreign.h>

namespace tessera::internal::pipeline {

namespace {

/// Mixes a number into a seed (splitmix64's finalizer).
uint64_t mixed(uint64_t seed, int64_t number) {
  auto bits = seed + 0x9e3779b97f4a7c15ULL * (static_cast<uint64_t>(number) + 1);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31);
}

} // namespace

at::Tensor InputNode::add(const at::Tensor& tensor) {
  auto input = tensor.detach();
  placements_.push_back(is_dtensor(input) ? std::optional(DTensor(input).placements()) : std::nullopt);
  torch::autograd::impl::set_gradient_edge(input, {shared_from_this(), add_input_metadata(input)});
  return input;
}

torch::autograd::variable_list InputNode::apply(torch::autograd::variable_list&& gradients) {
  gradients_ = std::move(gradients);
  return {};
}

std::vector<at::Tensor> InputNode::take() {
  const at::NoGradGuard no_grad;
  auto gradients = std::exchange(gradients_, {});
  gradients.resize(placements_.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && placements_[i]) gradients[i] = DTensor(gradients[i]).redistribute(*placements_[i]);
  }
  return gradients;
}

void LayerSeeds::apply(int64_t micro_batch, int64_t layer) const {
  if (seed) at::manual_seed(mixed(mixed(mixed(*seed, step), micro_batch), layer));
}

PipelineValue StageRun::run_layers(int64_t micro_batch, PipelineValue value, const PipelineValue& batch) {
  const StageScope scope(name_);
  for (auto layer = stage_.begin; layer < stage_.end; ++layer) {
    layer_ = layer;
    seeds_.apply(micro_batch, layer);
    value = stages_.layers.layers()[static_cast<size_t>(layer)].function(value, batch);
  }
  layer_.reset();
  return value;
}

std::string StageRun::place() const {
  if (!layer_) return name_;
  return c10::str("layer '", stages_.layers.layers()[static_cast<size_t>(*layer_)].name, "' of ", name_);
}

PipelineValue StageRun::forward(int64_t micro_batch, const PipelineValue& input, const PipelineValue& batch, bool splits) {
  if (!at::GradMode::is_enabled()) return run_layers(micro_batch, input, batch);
  auto& flight = in_flight_[micro_batch];
  flight.inputs = {new InputNode, torch::autograd::deleteNode};
  const auto inputs = stage_.index == 0 ? input : with_tensors(input, [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad() ? flight.inputs->add(tensor) : tensor;
  });
  if (!splits) return run_layers(micro_batch, inputs, batch);
  flight.queue = std::make_shared<WeightQueue>();
  const SplitBackward split(flight.queue);
  return run_layers(micro_batch, inputs, batch);
}

void StageRun::keep_graph(int64_t micro_batch, const std::vector<at::Tensor>& outputs) {
  auto& flight = in_flight_.at(micro_batch);
  for (const auto& tensor : outputs) {
    if (tensor.defined() && tensor.requires_grad()) flight.outputs.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
}

std::vector<at::Tensor> StageRun::backward(int64_t micro_batch, const std::vector<at::Tensor>& gradients) {
  auto& flight = in_flight_.at(micro_batch);
  torch::autograd::edge_list roots;
  torch::autograd::variable_list given;
  const auto outputs = std::exchange(flight.outputs, {});
  TORCH_INTERNAL_ASSERT(gradients.size() == outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(outputs[i]);
    given.push_back(gradients[i]);
  }
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots, given, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, {});
  }
  auto of_inputs = std::exchange(flight.inputs, nullptr)->take();
  if (!flight.queue) in_flight_.erase(micro_batch);
  return of_inputs;
}

void StageRun::weight_gradients(int64_t micro_batch) {
  const auto queue = std::exchange(in_flight_.at(micro_batch).queue, nullptr);
  in_flight_.erase(micro_batch);
  if (queue) queue->run();
}

} // namespace tessera::internal::pipeline
