#include "models.h"

#include <gpt/model.h>
#include <tessera/activations/recompute.h>

namespace tessera::benchmarks {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

class BlockImpl : public nn::Module {
 public:
  virtual Tensor forward(const Tensor& x) = 0;
};

/// x + down(relu(up(norm(x)))).
class MlpBlock : public BlockImpl {
 public:
  explicit MlpBlock(int64_t width)
      : norm_(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up_(register_module("up", nn::Linear(width, 4 * width))),
        down_(register_module("down", nn::Linear(4 * width, width))) {}
  Tensor forward(const Tensor& x) override { return x + down_(torch::relu(up_(norm_(x)))); }

 private:
  nn::LayerNorm norm_;
  nn::Linear up_, down_;
};

/// Two convolutions with group norms over images [rows, width, 8, 8].
class ResidualBlock : public BlockImpl {
 public:
  explicit ResidualBlock(int64_t width)
      : first_(register_module("first", nn::Conv2d(nn::Conv2dOptions(width, width, 3).padding(1).bias(false)))),
        second_(register_module("second", nn::Conv2d(nn::Conv2dOptions(width, width, 3).padding(1).bias(false)))),
        first_norm_(register_module("first_norm", nn::GroupNorm(8, width))),
        second_norm_(register_module("second_norm", nn::GroupNorm(8, width))) {}
  Tensor forward(const Tensor& x) override { return torch::relu(x + second_norm_(second_(torch::relu(first_norm_(first_(x)))))); }

 private:
  nn::Conv2d first_, second_;
  nn::GroupNorm first_norm_, second_norm_;
};

/// Four experts, of which each row of x [rows, width] goes to one.
class ExpertsBlock : public BlockImpl {
 public:
  explicit ExpertsBlock(int64_t width)
      : gate_(register_module("gate", nn::Linear(width, kExperts))), experts_(register_module("experts", nn::ModuleList())) {
    for (int64_t i = 0; i < kExperts; ++i) experts_->push_back(std::make_shared<MlpBlock>(width));
  }
  Tensor forward(const Tensor& x) override {
    const auto [weight, choice] = torch::softmax(gate_(x), -1).max(-1);
    auto y = torch::zeros_like(x);
    for (int64_t i = 0; i < kExperts; ++i) {
      const auto rows = (choice == i).nonzero().squeeze(1);
      const auto mine = experts_->at<BlockImpl>(static_cast<size_t>(i)).forward(x.index_select(0, rows));
      y = y.index_add(0, rows, (mine * weight.index_select(0, rows).unsqueeze(1)).to(y.scalar_type()));
    }
    return x + y;
  }

 private:
  static constexpr int64_t kExperts = 4;
  nn::Linear gate_;
  nn::ModuleList experts_;
};

/// LibTorch's own, over x [tokens, rows, width].
class EncoderBlock : public BlockImpl {
 public:
  explicit EncoderBlock(int64_t width)
      : layer_(register_module(
            "layer",
            nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(width, 4).dim_feedforward(4 * width).dropout(0)))) {}
  Tensor forward(const Tensor& x) override { return layer_(x); }

 private:
  nn::TransformerEncoderLayer layer_;
};

/// Blocks between what makes features of the input and what makes one number a feature of them.
class StackImpl : public nn::Module {
 public:
  explicit StackImpl(bool recomputes) : blocks(register_module("blocks", nn::ModuleList())), recomputes_(recomputes) {}
  Tensor run(Tensor x) {
    for (const auto& each : *blocks) {
      const auto block = std::dynamic_pointer_cast<BlockImpl>(each);
      x = recomputes_ ? recompute(block, x) : block->forward(x);
    }
    return x;
  }
  nn::ModuleList blocks;

 private:
  bool recomputes_;
};

/// Tables of embeddings whose rows meet in products, before a stack of MLPs.
class DlrmImpl : public StackImpl {
 public:
  explicit DlrmImpl(const Settings& settings)
      : StackImpl(settings.recompute),
        tables(register_module("tables", nn::ModuleList())),
        dense(register_module("dense", nn::Linear(13, settings.width))) {
    for (int64_t i = 0; i < kTables; ++i) tables->push_back(nn::Embedding(kRows, settings.width));
    for (int64_t i = 0; i < settings.layers; ++i) blocks->push_back(std::make_shared<MlpBlock>(settings.width));
  }
  Tensor forward(const Tensor& numbers, const Tensor& indices) {
    auto x = dense(numbers);
    for (int64_t i = 0; i < kTables; ++i) {
      const auto rows = tables->at<nn::EmbeddingImpl>(static_cast<size_t>(i)).forward(indices.select(1, i));
      x = x + rows * dense(numbers);
    }
    return run(x);
  }
  static constexpr int64_t kTables = 4, kRows = 2048;
  nn::ModuleList tables;
  nn::Linear dense;
};

std::vector<std::shared_ptr<nn::Module>> modules_of(const nn::ModuleList& list) { return {list->begin(), list->end()}; }

torch::Generator generator_of(int rank) { return at::detail::createCPUGenerator(1000 + static_cast<uint64_t>(rank)); }

BenchModel make_gpt(const Settings& settings, int rank) {
  gpt::Gpt model(gpt::ModelConfig{settings.layers, settings.width, 4, settings.sequence});
  model->set_recompute(settings.recompute);
  auto generator = generator_of(rank);
  const auto windows = torch::randint(0, gpt::kVocabulary, {settings.batch, settings.sequence + 1}, generator, torch::kLong);
  const auto inputs = windows.narrow(1, 0, settings.sequence), targets = windows.narrow(1, 1, settings.sequence);
  auto loss = [module = model.ptr(), inputs, targets] { return gpt::cross_entropy(module->forward(inputs), targets); };
  return {model.ptr(), modules_of(model->blocks()), loss, settings.batch * settings.sequence};
}

BenchModel make_dlrm(const Settings& settings, int rank) {
  const auto model = std::make_shared<DlrmImpl>(settings);
  auto generator = generator_of(rank);
  const auto numbers = torch::randn({settings.batch, 13}, generator);
  const auto indices = torch::randint(0, DlrmImpl::kRows, {settings.batch, DlrmImpl::kTables}, generator, torch::kLong);
  auto blocks = modules_of(model->tables);
  const auto stack = modules_of(model->blocks);
  blocks.insert(blocks.end(), stack.begin(), stack.end());
  return {model, blocks, [model, numbers, indices] { return model->forward(numbers, indices).to(torch::kFloat).square().mean(); },
          settings.batch};
}

/// A stack of `Block`s on `input`.
template <typename Block>
BenchModel make_stack(const Settings& settings, const Tensor& input, int64_t items) {
  const auto model = std::make_shared<StackImpl>(settings.recompute);
  for (int64_t i = 0; i < settings.layers; ++i) model->blocks->push_back(std::make_shared<Block>(settings.width));
  return {model, modules_of(model->blocks), [model, input] { return model->run(input).to(torch::kFloat).square().mean(); },
          items};
}

} // namespace

BenchModel make_model(const Settings& settings, int rank) {
  torch::manual_seed(1);
  if (settings.model == "gpt") return make_gpt(settings, rank);
  if (settings.model == "dlrm") return make_dlrm(settings, rank);
  auto generator = generator_of(rank);
  const int64_t rows = settings.batch, width = settings.width, tokens = rows * settings.sequence;
  if (settings.model == "resnet") return make_stack<ResidualBlock>(settings, torch::randn({rows, width, 8, 8}, generator), rows);
  if (settings.model == "moe") return make_stack<ExpertsBlock>(settings, torch::randn({tokens, width}, generator), tokens);
  if (settings.model == "encoder")
    return make_stack<EncoderBlock>(settings, torch::randn({settings.sequence, rows, width}, generator), tokens);
  return make_stack<MlpBlock>(settings, torch::randn({rows, width}, generator), rows);
}

} // namespace tessera::benchmarks
