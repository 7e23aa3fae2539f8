#pragma once

// Random models of layers that plans of tensor parallelism name, and random plans for them.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/styles.h>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::random_net {

constexpr int64_t kWidth = 24, kHeads = 12, kVocabulary = 30;

enum class Kind { kMlp, kGated, kPacked, kAttention, kGrouped, kNorm, kRmsNorm, kConvolution };

/// One block on a stream [batch, time, width].
struct BlockImpl : torch::nn::Module {
  BlockImpl(Kind kind, bool bias, int64_t hidden);
  torch::Tensor forward(const torch::Tensor& x);

  Kind kind;
  torch::nn::Linear up{nullptr}, down{nullptr}, gate{nullptr}, qkv{nullptr}, q{nullptr}, k{nullptr}, v{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Conv1d up_channels{nullptr}, down_channels{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Block);

/// What is drawn of a model and its batches, the same on all ranks.
struct Drawn {
  /// `splits_sequences`: without layers that go along the sequence.
  explicit Drawn(uint64_t seed, bool splits_sequences = false);
  struct BlockOptions {
    Kind kind;
    bool bias;
    int64_t hidden;
  };
  std::vector<BlockOptions> blocks;
  bool tied, freezes, recomputes, shards, ignores;
  int64_t time;
  double smoothing;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Drawn& drawn);
  torch::Tensor forward(const torch::Tensor& tokens);

  bool recomputes;
  torch::nn::Embedding table{nullptr};
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// In double, with some parameters frozen.
Net make_net(const Drawn& drawn, uint64_t seed);

/// Styles that fit, in every combination: also such as no one would choose.
ParallelPlan draw_plan(const Drawn& drawn, int64_t ranks, Draw& dice);

/// Layers that overlap, or not.
OverlapOptions draw_overlap(Draw& dice);

/// Some blocks by themselves, and the rest, over `mesh`; `each` gets the handles.
void shard_at_random(Net& net, const DeviceMesh& mesh, const FullyShardOptions& options, Draw& dice,
                     const std::function<void(FSDPModule)>& each = {});

} // namespace tessera::testing::random_net
