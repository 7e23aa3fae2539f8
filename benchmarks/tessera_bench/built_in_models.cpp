#include "built_in_models.h"

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
  explicit DlrmImpl(const BenchSettings& settings)
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

torch::Generator generator_of(const BenchPlace& place) {
  return at::detail::createCPUGenerator(1000 + static_cast<uint64_t>(place.rank));
}

int64_t tokens_of(const BenchSettings& settings) { return settings.batch * settings.sequence; }

BenchRecipe gpt_recipe() {
  return {.model = [](const BenchSettings& settings) -> BenchModel {
            gpt::Gpt model(gpt::ModelConfig{settings.layers, settings.width, 4, settings.sequence});
            model->set_recompute(settings.recompute);
            auto loss = [model](const std::vector<Tensor>& batch) mutable {
              return gpt::cross_entropy(model->forward(batch[0]), batch[1]);
            };
            return {model.ptr(), modules_of(model->blocks()), loss};
          },
          .batch = [](const BenchSettings& settings, const BenchPlace& place) -> std::vector<Tensor> {
            auto generator = generator_of(place);
            const auto windows =
                torch::randint(0, gpt::kVocabulary, {settings.batch, settings.sequence + 1}, generator, torch::kLong);
            return {windows.narrow(1, 0, settings.sequence), windows.narrow(1, 1, settings.sequence)};
          },
          .items = tokens_of};
}

BenchRecipe dlrm_recipe() {
  return {.model = [](const BenchSettings& settings) -> BenchModel {
            const auto model = std::make_shared<DlrmImpl>(settings);
            auto blocks = modules_of(model->tables);
            const auto stack = modules_of(model->blocks);
            blocks.insert(blocks.end(), stack.begin(), stack.end());
            return {model, blocks, [model](const std::vector<Tensor>& batch) {
                      return model->forward(batch[0], batch[1]).to(torch::kFloat).square().mean();
                    }};
          },
          .batch = [](const BenchSettings& settings, const BenchPlace& place) -> std::vector<Tensor> {
            auto generator = generator_of(place);
            const auto numbers = torch::randn({settings.batch, 13}, generator);
            return {numbers, torch::randint(0, DlrmImpl::kRows, {settings.batch, DlrmImpl::kTables}, generator, torch::kLong)};
          }};
}

/// Of an input's rows, as the blocks of a stack take it.
using Prepare = Tensor (*)(const Tensor& rows);

/// A stack of `Block`s.
template <typename Block>
std::function<BenchModel(const BenchSettings&)> stack_of(Prepare prepare) {
  return [prepare](const BenchSettings& settings) -> BenchModel {
    const auto model = std::make_shared<StackImpl>(settings.recompute);
    for (int64_t i = 0; i < settings.layers; ++i) model->blocks->push_back(std::make_shared<Block>(settings.width));
    return {model, modules_of(model->blocks), [model, prepare](const std::vector<Tensor>& batch) {
              return model->run(prepare(batch[0])).to(torch::kFloat).square().mean();
            }};
  };
}

/// Normal numbers of this shape.
template <typename Shape> // std::vector<int64_t>(const BenchSettings&)
std::function<std::vector<Tensor>(const BenchSettings&, const BenchPlace&)> numbers(Shape shape) {
  return [shape](const BenchSettings& settings, const BenchPlace& place) -> std::vector<Tensor> {
    auto generator = generator_of(place);
    return {torch::randn(shape(settings), generator)};
  };
}

using Sizes = std::vector<int64_t>;
Sizes row_sizes(const BenchSettings& settings) { return {settings.batch, settings.width}; }
Sizes image_sizes(const BenchSettings& settings) { return {settings.batch, settings.width, 8, 8}; }
Sizes token_sizes(const BenchSettings& settings) { return {settings.batch, settings.sequence, settings.width}; }

} // namespace

BenchModels built_in_models() {
  const Prepare as_it_is = [](const Tensor& rows) { return rows; };
  const Prepare one_after_another = [](const Tensor& rows) { return rows.flatten(0, 1); };
  const Prepare tokens_first = [](const Tensor& rows) { return rows.transpose(0, 1); };
  BenchModels models;
  models.add("gpt", gpt_recipe());
  models.add("mlp", {.model = stack_of<MlpBlock>(as_it_is), .batch = numbers(row_sizes)});
  models.add("resnet", {.model = stack_of<ResidualBlock>(as_it_is), .batch = numbers(image_sizes)});
  models.add("moe", {.model = stack_of<ExpertsBlock>(one_after_another), .batch = numbers(token_sizes), .items = tokens_of});
  models.add("dlrm", dlrm_recipe());
  models.add("encoder", {.model = stack_of<EncoderBlock>(tokens_first), .batch = numbers(token_sizes), .items = tokens_of});
  return models;
}

} // namespace tessera::benchmarks
