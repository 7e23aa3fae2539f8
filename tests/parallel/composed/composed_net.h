#pragma once

// A small GPT, maybe with experts, that is split over all dims of a mesh.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/part_order.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/pipeline_layers.h>

#include <tessera/tests/fsdp/models.h>
#include <tessera/tests/parallel/small_gpt.h>

namespace tessera::testing::composed {

struct NetOptions {
  static constexpr int64_t kVocabulary = 29, kWidth = 24, kTime = 8, kHeads = 4, kKeyHeads = 2;

  int64_t depth = 6;
  int64_t attending = 1000; ///< so many of the first blocks have attention, others an MLP alone
  bool ties = true;
  int64_t experts = 0; ///< of every block; 0: none
  ExpertStorage storage = ExpertStorage::kStacked;
  torch::Dtype dtype = torch::kFloat;
  std::optional<Float8Scaling> float8 = std::nullopt; ///< linear layers multiply in fp8, but the head and experts
};

using MlpBlock = testing::Block; ///< what a block of GPT is without attention

/// A block of GPT, or its MLP alone, then experts.
struct BlockImpl : torch::nn::Module {
  BlockImpl(const NetOptions& options, bool attends);
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = mlp.is_empty() ? dense(x) : mlp(x);
    return experts.is_empty() ? y : y + experts(norm(y));
  }
  GptBlock dense{nullptr};
  MlpBlock mlp{nullptr}; ///< under the name of `dense`, in its place
  torch::nn::LayerNorm norm{nullptr};
  MoE experts{nullptr};
};
TORCH_MODULE(Block);

/// Tokens, targets and positions of a rank, and how their sequences lie: a key of `Net::parts`, or -1 where they are whole.
using Batch = std::tuple<torch::Tensor, torch::Tensor, torch::Tensor, int64_t>;

/// Layers: embed, blocks.0, …, head.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const NetOptions& options);

  torch::Tensor embed(const Batch& batch) { return tokens(std::get<0>(batch)) + places(std::get<2>(batch)); }
  torch::Tensor run_block(BlockImpl& block, const torch::Tensor& x, const Batch& batch) const;
  torch::Tensor logits(const torch::Tensor& x) { return options.ties ? torch::linear(norm(x), tokens->weight) : head(norm(x)); }
  torch::Tensor forward(const Batch& batch);

  NetOptions options;
  bool recomputes = false;
  ContextParallel scheme = ContextParallel::kAllGather;
  std::map<int64_t, DeviceMesh> parts; ///< of split sequences, by how much padding they have
  std::function<void(const BlockImpl& block, const torch::Tensor& x)> before_block; ///< may throw
  torch::nn::Embedding tokens{nullptr}, places{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// Draws the weights; threads that are ranks may call it at once.
Net make_net(const NetOptions& options, uint64_t seed);

PipelineLayers layers_of(NetImpl& net);

/// Micro-batch `index` of data rank `rank`, whole. Rows and time differ, and so do the targets that count. Experts get sequences
/// that 2 and 4 ranks divide: they would count padding, too.
Batch draw_batch(const NetOptions& options, uint64_t seed, int64_t rank, int64_t index);
/// This rank's part of its sequences over `mesh`. Every rank of it calls this.
Batch split_batch(NetImpl& net, const Batch& batch, const DeviceMesh& mesh, PartOrder order);

torch::Tensor summed_loss(const torch::Tensor& logits, const Batch& batch);
double counted(const Batch& batch);

} // namespace tessera::testing::composed
