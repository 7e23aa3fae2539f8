#pragma once

// Internal: the layers that a config of layers is made of.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/parallel/styles.h>

namespace tessera::internal::models {

/// One that takes and returns a tensor.
class Layer : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

/// Layers one after another, named "0", "1", …
class LayerList : public Layer {
 public:
  /// `adds`: what went in is added to what comes out.
  LayerList(std::vector<std::shared_ptr<Layer>> layers, bool adds);
  at::Tensor forward(const at::Tensor& x) override;
  const std::vector<std::shared_ptr<Layer>>& layers() const { return layers_; }

 private:
  std::vector<std::shared_ptr<Layer>> layers_;
  bool adds_;
};

/// The same layers several times, each with parameters of its own: the blocks of a model, named "0", "1", …
class LayerRepetition : public Layer {
 public:
  explicit LayerRepetition(std::vector<std::shared_ptr<Layer>> blocks);
  at::Tensor forward(const at::Tensor& x) override;
  const std::vector<std::shared_ptr<Layer>>& blocks() const { return blocks_; }

 private:
  std::vector<std::shared_ptr<Layer>> blocks_;
};

/// The layers of an array. Errors name the key: an unknown kind of layer or key (with the nearest), one that is missing, a size
/// that is not positive.
std::vector<std::shared_ptr<Layer>> make_layers(const JsonView& array, bool with_dropout);

/// The lines of tensor parallelism for such layers, whose paths begin with `path`.
void add_lines(ParallelPlan& plan, const JsonView& array, const std::string& path);

/// An error for a key that is not among `known`, with the nearest of these.
void check_keys(const JsonView& json, const std::vector<std::string>& known);

} // namespace tessera::internal::models
