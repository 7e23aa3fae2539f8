#pragma once

// Internal: what a rank computes of one stage in a step, without what is sent.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/parallel/backward/weight_queue.h>
#include <tessera/parallel/pipeline_stages.h>
#include <tessera/parallel/stages/value_tree.h>

namespace tessera::internal::pipeline {

/// Seeds the random numbers of a layer; nothing where the program seeds them.
struct LayerSeeds {
  std::optional<uint64_t> seed;
  int64_t step = 0;
  void apply(int64_t micro_batch, int64_t layer) const;
};

/// The beginning of a stage's graph. It takes the gradients of the stage's inputs. They are no leaves, which could not be
/// written in place.
class InputNode final : public torch::autograd::Node {
 public:
  /// A tensor with the values of `tensor`, whose gradient comes here.
  at::Tensor add(const at::Tensor& tensor);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "StageInput"; }
  /// The gradients of the tensors, as these lie; undefined ones where none came.
  std::vector<at::Tensor> take();

 private:
  std::vector<std::optional<Placements>> placements_; ///< of DTensors
  std::vector<at::Tensor> gradients_;
};

class StageRun {
 public:
  StageRun(const PipelineStages& stages, const PipelineStage& stage, LayerSeeds seeds)
      : stages_(stages), stage_(stage), name_(stages.describe(stage.index)), seeds_(seeds) {}

  /// Runs the layers. In grad mode the gradients of those tensors of `input` that require one are kept for `backward`; not of the
  /// first stage's. `splits`: its backward comes in two halves.
  PipelineValue forward(int64_t micro_batch, const PipelineValue& input, const PipelineValue& batch, bool splits);
  /// Keeps the way from `outputs` back to the inputs and the parameters, for the backward, and not the outputs themselves.
  void keep_graph(int64_t micro_batch, const std::vector<at::Tensor>& outputs);
  const std::vector<torch::autograd::Edge>& edges(int64_t micro_batch) const { return in_flight_.at(micro_batch).outputs; }

  /// Whether the outputs have a gradient to come.
  bool has_graph(int64_t micro_batch) const {
    const auto found = in_flight_.find(micro_batch);
    return found != in_flight_.end() && !found->second.outputs.empty();
  }
  /// The backward, or its first half, from the gradients of those outputs that require one. Returns the gradients of the inputs
  /// that do, undefined where none came.
  std::vector<at::Tensor> backward(int64_t micro_batch, const std::vector<at::Tensor>& gradients);
  /// The second half.
  void weight_gradients(int64_t micro_batch);

  const PipelineStage& stage() const { return stage_; }
  const std::string& name() const { return name_; }
  /// Whether a layer computes, or has thrown.
  bool is_in_layer() const { return layer_.has_value(); }
  /// "layer 'head' of stage 1 (…)" then, else the name.
  std::string place() const;

 private:
  struct InFlight {
    std::shared_ptr<InputNode> inputs;
    std::vector<torch::autograd::Edge> outputs;
    WeightQueuePtr queue;
  };
  PipelineValue run_layers(int64_t micro_batch, PipelineValue value, const PipelineValue& batch);

  const PipelineStages& stages_;
  const PipelineStage& stage_;
  std::string name_;
  LayerSeeds seeds_;
  std::optional<int64_t> layer_;          ///< that computes
  std::map<int64_t, InFlight> in_flight_; ///< by micro-batch
};

} // namespace tessera::internal::pipeline
