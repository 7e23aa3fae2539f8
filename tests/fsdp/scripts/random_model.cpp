#include "random_model.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>

namespace tessera::testing::scripts {
namespace {

/// One or two blocks, and maybe a parameter beside them.
struct Nested : Block {
  explicit Nested(Draw& draw) {
    const auto kinds = module_blocks();
    const auto others = parameter_blocks();
    const int64_t count = 1 + draw.below(2);
    for (int64_t i = 0; i < count; ++i) {
      inner.push_back(draw.of(draw.chance(50) ? kinds : others).make(draw));
      register_module("inner" + std::to_string(i), inner.back());
    }
    if (draw.chance(70)) gate = parameter("gate", {kWidth});
  }
  Tensor forward(const Tensor& x, const Tensor& ids) override {
    auto y = x;
    for (const auto& block : inner) y = block->forward(y.to(x.scalar_type()), ids); // one may make doubles of floats
    return gate.defined() ? y * torch::sigmoid(gate) + y : y;
  }
  std::vector<BlockPtr> inner;
  Tensor gate;
};

/// A layer whose weight is another block's.
struct TiedLinear : Block {
  TiedLinear(const Tensor& shared) : weight(register_parameter("weight", shared)), bias(parameter("bias", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return torch::tanh(torch::linear(x, weight, bias)); }
  Tensor weight, bias;
};

bool is_low_precision(const Tensor& tensor) {
  return tensor.scalar_type() != torch::kDouble && tensor.scalar_type() != torch::kComplexDouble;
}

} // namespace

std::vector<BlockKind> block_kinds() {
  std::vector<BlockKind> all{block_kind<Nested>("nested")};
  for (const auto& kinds : {module_blocks(), layer_blocks(), parameter_blocks(), view_blocks(), function_blocks()})
    all.insert(all.end(), kinds.begin(), kinds.end());
  return all;
}

std::vector<BlockKind> block_kinds_by_rows() {
  const std::set<std::string> others{"batch norm",      "image",      "buffered", "saves parameter",
                                     "reads unsharded", "recomputed", "nested",   "mixed dtypes"};
  auto kinds = block_kinds();
  std::erase_if(kinds, [&](const BlockKind& kind) { return others.count(kind.name) > 0; });
  return kinds;
}

RandomModel::RandomModel(uint64_t seed, const std::vector<BlockKind>& pool) {
  Draw draw(seed);
  torch::manual_seed(draw.seed());
  const int64_t count = 2 + draw.below(4);
  for (int64_t i = 0; i < count; ++i) add_block("block" + std::to_string(i), draw.of(pool), draw);
  head_ = register_parameter("head", torch::randn({kWidth, 2}));
  if (draw.chance(30)) tie_weights(draw);
  if (draw.chance(15)) register_module("again", blocks_.front());
  for (auto& parameter : parameters()) {
    if (!is_low_precision(parameter) && draw.chance(8)) parameter.requires_grad_(false);
  }
}

void RandomModel::add_block(const std::string& name, const BlockKind& kind, Draw& draw) {
  blocks_.push_back(register_module(name, kind.make(draw)));
  description_ += (description_.empty() ? "" : ", ") + kind.name;
}

void RandomModel::add_random_block(uint64_t seed) {
  Draw draw(seed);
  torch::manual_seed(draw.seed());
  auto kinds = draw.chance(50) ? parameter_blocks() : view_blocks();
  const auto all = parameters();
  // A reduction by policy takes no complex numbers, and a model may have one that had none where it was sharded.
  if (std::none_of(all.begin(), all.end(), [](const Tensor& each) { return each.is_complex(); }))
    std::erase_if(kinds, [](const BlockKind& kind) { return kind.name == "complex"; });
  add_block("added" + std::to_string(blocks_.size()), draw.of(kinds), draw);
}

void RandomModel::renew_head(uint64_t seed) {
  torch::manual_seed(seed);
  parameters_.erase("head");
  head_ = register_parameter("head", torch::randn({kWidth, 2}));
}

void RandomModel::tie_weights(Draw& draw) {
  std::vector<Tensor> square;
  for (const auto& parameter : parameters()) {
    if (parameter.sizes() == torch::IntArrayRef({kWidth, kWidth}) && !is_low_precision(parameter)) square.push_back(parameter);
  }
  if (square.empty()) return;
  const auto shared = draw.of(square);
  add_block("tied", {"tied", [&](Draw&) { return std::make_shared<TiedLinear>(shared); }}, draw);
}

Tensor RandomModel::forward(const Tensor& x, const Tensor& ids, const std::vector<size_t>& order, const Tap& tap,
                            const RunBlock& run) {
  auto y = x;
  for (size_t position = 0; position < order.size(); ++position) {
    const auto& block = blocks_[order[position]];
    if (input_dtype_) y = y.to(*input_dtype_);
    y = run ? run(block, y, ids) : block->forward(y, ids);
    y = y.clamp(-20, 20); // so that no draw of blocks diverges
    if (tap) y = tap(position, y);
  }
  return (input_dtype_ ? y.to(*input_dtype_) : y).matmul(head_);
}

std::vector<size_t> RandomModel::whole_order() const {
  std::vector<size_t> order(blocks_.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<size_t> RandomModel::random_order(Draw& draw) const {
  if (draw.chance(60)) return whole_order();
  const auto blocks = static_cast<int64_t>(blocks_.size());
  std::vector<size_t> order(static_cast<size_t>(1 + draw.below(blocks + 2)));
  for (auto& index : order) index = static_cast<size_t>(draw.below(blocks));
  return order;
}

template <typename Property>
bool RandomModel::any_block(const Property& property) const {
  const auto all = modules();
  return std::any_of(all.begin(), all.end(), [&](const auto& module) {
    const auto* block = dynamic_cast<const Block*>(module.get());
    return block != nullptr && property(*block);
  });
}

bool RandomModel::has_inner_backward() const {
  return any_block([](const Block& block) { return block.has_inner_backward(); });
}

bool RandomModel::reads_beside_gradient() const {
  return any_block([](const Block& block) { return block.reads_beside_gradient(); });
}

bool RandomModel::is_twice_differentiable() const {
  return !any_block([](const Block& block) { return !block.is_twice_differentiable(); });
}

bool RandomModel::is_double() const {
  const auto all = parameters();
  return std::none_of(all.begin(), all.end(), is_low_precision);
}

} // namespace tessera::testing::scripts
