// Blocks around LibTorch's modules.
#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {
namespace {

namespace nn = torch::nn;

struct Linear : Block {
  explicit Linear(Draw& draw)
      : linear(register_module("linear", nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(draw.chance(70))))) {
    maybe_permute(draw, linear->weight);
  }
  Tensor forward(const Tensor& x, const Tensor&) override { return torch::tanh(linear(x)); }
  nn::Linear linear;
};

struct Embedding : Block {
  explicit Embedding(Draw& draw)
      : table(register_module("table", nn::Embedding(kVocabulary + draw.below(kVocabulary), kWidth))) {}
  Tensor forward(const Tensor& x, const Tensor& ids) override { return x + table(ids).mean(1); }
  nn::Embedding table;
};

struct LayerNorm : Block {
  explicit LayerNorm(Draw&) : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return norm(x); }
  nn::LayerNorm norm;
};

struct GruCell : Block {
  explicit GruCell(Draw&) : cell(register_module("cell", nn::GRUCell(kWidth, kWidth))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return cell(x, x * 0.5); }
  nn::GRUCell cell;
};

struct Convolution : Block {
  explicit Convolution(Draw& draw)
      : convolution(register_module("convolution", nn::Conv1d(nn::Conv1dOptions(1, 3, 3).padding(1)))) {
    maybe_permute(draw, convolution->weight);
  }
  Tensor forward(const Tensor& x, const Tensor&) override { return x + convolution(x.unsqueeze(1)).mean(1); }
  nn::Conv1d convolution;
};

/// Attends within a row: rows stay independent of each other, so that a batch may be split.
struct Attention : Block {
  explicit Attention(Draw&) : attention(register_module("attention", nn::MultiheadAttention(2, 1))) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto sequence = x.view({x.size(0), kWidth / 2, 2}).transpose(0, 1);
    return x + std::get<0>(attention(sequence, sequence, sequence)).transpose(0, 1).reshape(x.sizes());
  }
  nn::MultiheadAttention attention;
};

/// Bounded: four in a row would be of the 16th degree, and gradients that are reduced in float round too much. The kink is small.
struct Bilinear : Block {
  explicit Bilinear(Draw& draw)
      : bilinear(register_module("bilinear", nn::Bilinear(kWidth, kWidth, kWidth))),
        activation(register_module("activation", nn::PReLU(nn::PReLUOptions().init(0.9)))) {
    maybe_permute(draw, bilinear->weight);
  }
  Tensor forward(const Tensor& x, const Tensor&) override { return activation(bilinear(x, x).tanh() + x); }
  nn::Bilinear bilinear;
  nn::PReLU activation;
};

/// Without a kink: where rounding puts an activation on its other side, the gradient jumps.
struct InplaceSequential : Block {
  explicit InplaceSequential(Draw&)
      : layers(register_module(
            "layers", nn::Sequential(nn::Linear(kWidth, 5), nn::ELU(nn::ELUOptions().inplace(true)), nn::Linear(5, kWidth)))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return x + layers->forward(x); }
  nn::Sequential layers;
};

/// On the sharded side its statistics are those of all ranks' rows.
struct BatchNorm : Block {
  explicit BatchNorm(Draw& draw)
      : norm(register_module("norm", nn::BatchNorm1d(nn::BatchNorm1dOptions(kWidth)
                                                         .affine(draw.chance(80))
                                                         .momentum(draw.chance(80) ? std::optional(0.1) : std::nullopt)))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return norm(x) + x * 0.5; }
  bool is_twice_differentiable() const override { return false; }
  nn::BatchNorm1d norm;
};

} // namespace

std::vector<BlockKind> module_blocks() {
  return {block_kind<Linear>("linear"),           block_kind<Embedding>("embedding"),
          block_kind<LayerNorm>("layer norm"),    block_kind<GruCell>("gru cell"),
          block_kind<Convolution>("convolution"), block_kind<Attention>("attention"),
          block_kind<Bilinear>("bilinear"),       block_kind<InplaceSequential>("inplace sequential"),
          block_kind<BatchNorm>("batch norm")};
}

} // namespace tessera::testing::scripts
