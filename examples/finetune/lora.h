#pragma once

#include <tessera/checkpoint/state_dict.h>
#include <tessera/training/own_settings.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

/// Low-rank adapters (Hu et al., "LoRA", arXiv 2106.09685): y = W x + b + alpha / rank · B A x, where W and b are frozen and A
/// [rank, inputs] and B [outputs, rank] are trained. Names, initial values and files are those of Hugging Face's PEFT.
namespace lora {

struct Options {
  int64_t rank = 0; ///< of the adapters; 0: there are none
  double alpha = 16;
  std::vector<std::string> targets = {"query", "value"}; ///< ends of modules' names: "query" is every module of that name

  /// Reads "lora_r", "lora_alpha" and "target_modules". Errors for values that mean nothing.
  void read(tessera::OwnSettings& settings);
};

/// LibTorch's Linear, to which an adapter can be added: the children "lora_A" and "lora_B". Without one it is a Linear.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  torch::Tensor forward(const torch::Tensor& input);

  /// Freezes this layer's own parameters. The adapter has the dtype and the device of the weight. An error for a layer that has
  /// one, and for a rank that is larger than the layer.
  void add_adapter(int64_t rank, double alpha);
  /// A is drawn as `torch::nn::Linear` draws its weight, and B is 0: the layer computes what it did. On every rank of a mesh,
  /// with generators that agree.
  void reset_adapter();
  /// Adds the adapter's product to the weight and sets B to 0: the layer computes what it did. On every rank of a mesh; one whole
  /// weight is gathered.
  void merge_adapter();
  bool has_adapter() const { return !a_.is_empty(); }

 private:
  torch::nn::Linear a_{nullptr}, b_{nullptr};
  double scale_ = 1; // alpha / rank
};
TORCH_MODULE(Linear);

/// Adds adapters to the layers of `model` that the options name, and freezes all other parameters. Before the model is sharded;
/// without memory (`on_meta`) as well. An error for a target that no module's name ends with, or that is no lora::Linear.
void add_adapters(torch::nn::Module& model, const Options& options);

/// All layers with adapters below `model` or at it.
std::vector<LinearImpl*> adapted_layers(torch::nn::Module& model);

/// Whether a parameter's name is that of an adapter's.
bool is_adapter(const std::string& name);

/// Writes the adapters as PEFT does: adapter_model.safetensors with the names "base_model.model.<module>.lora_A.weight", and
/// adapter_config.json, which names `base` as the model that they belong to. It replaces adapters that
/// `folder` holds; what else is there stays. Every rank calls it.
void save_adapters(const torch::nn::Module& model, const Options& options, const std::string& base,
                   const std::filesystem::path& folder);

} // namespace lora
