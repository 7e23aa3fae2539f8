// Blocks around more of LibTorch's modules: those that hold others, lists of parameters, and several dims.
#include <tessera/nn/sync_batch_norm.h>

#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {
namespace {

namespace nn = torch::nn;

/// Its module keeps the weights a second time, in a list.
struct Lstm : Block {
  explicit Lstm(Draw& draw)
      : lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(2, 3)
                                                  .num_layers(1 + draw.below(2))
                                                  .bidirectional(draw.chance(30))
                                                  .bias(draw.chance(70))
                                                  .batch_first(true)))) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto states = std::get<0>(lstm(x.view({x.size(0), kWidth / 2, 2}))); // [batch, 3, 3 or 6]
    return x + states.flatten(1).slice(1, 0, kWidth);
  }
  bool is_twice_differentiable() const override { return false; }
  nn::LSTM lstm;
};

struct Gru : Block {
  explicit Gru(Draw&) : gru(register_module("gru", nn::GRU(nn::GRUOptions(2, 2).batch_first(true)))) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return x + std::get<0>(gru(x.view({x.size(0), kWidth / 2, 2}))).flatten(1);
  }
  bool is_twice_differentiable() const override { return false; }
  nn::GRU gru;
};

/// Images of 2 x 3. On the sharded side the norm's statistics are those of all ranks' rows.
struct Image : Block {
  explicit Image(Draw& draw)
      : convolution(register_module("convolution", nn::Conv2d(nn::Conv2dOptions(1, 2, 3).padding(1).bias(draw.chance(50))))),
        norm(register_module("norm", nn::BatchNorm2d(2))),
        back(register_module("back", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2, 1, 1)))) {
    maybe_permute(draw, convolution->weight);
  }
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto image = norm(convolution(x.view({x.size(0), 1, 2, 3})));
    return x + back(torch::tanh(image)).flatten(1);
  }
  bool is_twice_differentiable() const override { return false; }
  nn::Conv2d convolution;
  nn::BatchNorm2d norm;
  nn::ConvTranspose2d back;
};

struct GroupNorm : Block {
  explicit GroupNorm(Draw&) : norm(register_module("norm", nn::GroupNorm(nn::GroupNormOptions(2, kWidth)))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return norm(x) + 0.5 * x; }
  nn::GroupNorm norm;
};

/// Attends within a row.
struct Transformer : Block {
  explicit Transformer(Draw&)
      : layer(register_module(
            "layer", nn::TransformerEncoderLayer(
                         nn::TransformerEncoderLayerOptions(2, 2).dim_feedforward(3).dropout(0).activation(torch::kGELU)))) {
    // The norm of two numbers is 1 and -1, in their order: what is nearly equal would be a matter of rounding.
    for (auto* norm : {layer->norm1.get(), layer->norm2.get()}) norm->options.eps(0.5);
  }
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto sequence = x.view({x.size(0), kWidth / 2, 2}).transpose(0, 1);
    return x + 0.5 * layer(sequence).transpose(0, 1).reshape(x.sizes()).tanh();
  }
  bool is_twice_differentiable() const override { return false; }
  nn::TransformerEncoderLayer layer;
};

struct Bag : Block {
  explicit Bag(Draw& draw)
      : bag(register_module("bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(kVocabulary, kWidth)
                                                        .mode(draw.chance(50) ? BagMode(torch::kMean) : BagMode(torch::kSum))))) {
  }
  Tensor forward(const Tensor& x, const Tensor& ids) override { return x + 0.3 * bag(ids); }
  bool is_twice_differentiable() const override { return false; }
  using BagMode = nn::EmbeddingBagMode;
  nn::EmbeddingBag bag;
};

/// Parameters and modules by number and by name, one of the modules used twice.
struct Containers : Block {
  explicit Containers(Draw&) {
    gains = register_module("gains", nn::ParameterList());
    shifts = register_module("shifts", nn::ParameterDict());
    layers = register_module("layers", nn::ModuleList());
    named = register_module("named", nn::ModuleDict());
    for (int64_t i = 0; i < 2; ++i) {
      gains->append(torch::randn({kWidth}) * 0.3);
      shifts->insert(std::to_string(i), torch::randn({kWidth}) * 0.3);
      layers->push_back(nn::Linear(kWidth, kWidth));
    }
    named->update({{"inner", nn::Linear(kWidth, kWidth).ptr()}});
  }
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto y = x;
    auto& inner = *named["inner"]->as<nn::Linear>();
    for (size_t i = 0; i < 2; ++i) {
      y = torch::tanh(layers[i]->as<nn::Linear>()->forward(y)) * gains[i] + shifts[std::to_string(i)];
      y = y + 0.5 * inner.forward(y).tanh();
    }
    return y;
  }
  nn::ParameterList gains{nullptr};
  nn::ParameterDict shifts{nullptr};
  nn::ModuleList layers{nullptr};
  nn::ModuleDict named{nullptr};
};

} // namespace

std::vector<BlockKind> layer_blocks() {
  return {block_kind<Lstm>("lstm"),
          block_kind<Gru>("gru"),
          block_kind<Image>("image"),
          block_kind<GroupNorm>("group norm"),
          block_kind<Transformer>("transformer"),
          block_kind<Bag>("bag"),
          block_kind<Containers>("containers")};
}

} // namespace tessera::testing::scripts
