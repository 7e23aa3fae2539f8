// Random models, sharded at random, train as unsharded.
#include <gtest/gtest.h>

#include <numeric>

#include <tessera/activations/recompute.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::random_models_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kTokens = 3, kFeatures = 4;

/// A module from [batch, kTokens, kFeatures] to the same shape.
struct Node : nn::Module {
  using nn::Module::Module;
  virtual Tensor forward(const Tensor& x) = 0;
  bool is_group = false; ///< fully_shard makes it a group of its own
};
using NodePtr = std::shared_ptr<Node>;

template <typename Holder>
struct Leaf : Node {
  using Apply = std::function<Tensor(Holder&, const Tensor&)>;
  Leaf(Holder made, Apply how) : module(register_module("module", made)), apply(std::move(how)) {}
  Tensor forward(const Tensor& x) override { return apply(module, x); }
  Holder module;
  Apply apply;
};

template <typename Holder>
NodePtr leaf(Holder module, typename Leaf<Holder>::Apply apply) {
  return std::make_shared<Leaf<Holder>>(std::move(module), std::move(apply));
}

/// Parameters of a node itself: a scale, a slice of a table, one that is never used, and maybe a weight tied to a leaf's.
struct Own : Node {
  explicit Own(Draw& draw)
      : scale(register_parameter("scale", torch::tensor(0.9))),
        table(register_parameter("table", torch::randn({5, kFeatures}))),
        unused(register_parameter("unused", torch::randn({2}))),
        row(draw.below(5)) {}
  Tensor forward(const Tensor& x) override { return x * scale + table[row].tanh(); }
  Tensor scale, table, unused;
  int64_t row;
};

struct Chain : Node {
  Tensor forward(const Tensor& x) override {
    auto y = x;
    for (const auto& node : nodes) {
      const auto z = recomputes ? recompute(*node, y) : node->forward(y);
      y = residual ? y + z : z;
    }
    return y.tanh(); // so that no draw of modules diverges
  }
  std::vector<NodePtr> nodes; ///< may name one node twice: a module that is used twice
  bool residual = false, recomputes = false;
};

NodePtr random_leaf(Draw& draw) {
  switch (draw.below(9)) {
    case 0:
      return leaf<nn::Linear>(nn::Linear(nn::LinearOptions(kFeatures, kFeatures).bias(draw.chance(50))),
                              [](nn::Linear& m, const Tensor& x) { return m(x).tanh(); });
    case 1:
      return leaf<nn::Sequential>(
          nn::Sequential(nn::Linear(kFeatures, 7), nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(7, kFeatures)),
          [](nn::Sequential& m, const Tensor& x) { return m->forward(x); });
    case 2:
      return leaf<nn::LayerNorm>(nn::LayerNorm(nn::LayerNormOptions({kFeatures})),
                                 [](nn::LayerNorm& m, const Tensor& x) { return m(x); });
    case 3:
      return leaf<nn::GRU>(nn::GRU(nn::GRUOptions(kFeatures, kFeatures).batch_first(true)),
                           [](nn::GRU& m, const Tensor& x) { return std::get<0>(m(x)); });
    case 4:
      return leaf<nn::MultiheadAttention>(nn::MultiheadAttention(kFeatures, 2),
                                          [](nn::MultiheadAttention& m, const Tensor& x) { return std::get<0>(m(x, x, x)); });
    case 5:
      return leaf<nn::Conv1d>(nn::Conv1d(nn::Conv1dOptions(kTokens, kTokens, 3).padding(1)),
                              [](nn::Conv1d& m, const Tensor& x) { return torch::relu(m(x)); });
    case 6:
      return leaf<nn::Linear>(nn::Linear(kFeatures, kFeatures), [](nn::Linear& m, const Tensor& x) {
        const auto transposed = m->weight.t();
        return x.matmul(transposed).matmul(m->weight.detach()).tanh() + m->bias;
      });
    case 7:
      return leaf<nn::Embedding>(nn::Embedding(6, kFeatures), [](nn::Embedding& m, const Tensor& x) {
        return x + m((x.detach().abs().sum(-1) * 10).to(torch::kLong).remainder(6));
      });
    default: return std::make_shared<Own>(draw);
  }
}

NodePtr random_node(Draw& draw, int64_t depth) {
  NodePtr made;
  if (depth == 0 || draw.chance(35)) {
    made = random_leaf(draw);
  } else {
    auto chain = std::make_shared<Chain>();
    chain->residual = draw.chance(50);
    chain->recomputes = draw.chance(25);
    const int64_t length = 1 + draw.below(3);
    for (int64_t i = 0; i < length; ++i) {
      chain->nodes.push_back(random_node(draw, depth - 1));
      chain->register_module("node" + std::to_string(i), chain->nodes.back());
    }
    if (draw.chance(15)) chain->nodes.push_back(chain->nodes.front());
    made = chain;
  }
  made->is_group = draw.chance(40);
  return made;
}

struct RandomModel : CaseModel {
  explicit RandomModel(uint64_t seed) {
    Draw draw(seed);
    body = random_node(draw, 3);
    register_module("body", body);
    head = register_module("head", nn::Linear(kFeatures, 1));
    uses_sgd = draw.chance(50);
    std::vector<Tensor> weights;
    for (auto& item : body->named_parameters()) {
      if (draw.chance(15)) item.value().requires_grad_(false);
      if (item.value().sizes() == torch::IntArrayRef({kFeatures, kFeatures})) weights.push_back(item.value());
    }
    if (!weights.empty() && draw.chance(30))
      tied = register_parameter("tied", weights[static_cast<size_t>(draw.below(static_cast<int64_t>(weights.size())))]);
  }
  Tensor loss(const Tensor& x) override {
    auto y = body->forward(x.repeat({1, 2}).view({4, kTokens, kFeatures}));
    if (tied.defined()) y = y.matmul(tied);
    return head(y).square().mean();
  }
  std::vector<std::shared_ptr<nn::Module>> units() override {
    std::vector<std::shared_ptr<nn::Module>> groups;
    std::function<void(const NodePtr&)> visit = [&](const NodePtr& node) {
      if (const auto chain = std::dynamic_pointer_cast<Chain>(node)) {
        for (const auto& child : chain->nodes) visit(child);
      }
      const bool known = std::find(groups.begin(), groups.end(), node) != groups.end();
      if (node->is_group && !known) groups.push_back(node);
    };
    visit(body);
    return groups;
  }
  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    if (uses_sgd) return std::make_unique<torch::optim::SGD>(parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    return std::make_unique<torch::optim::AdamW>(parameters(), torch::optim::AdamWOptions(1e-3).eps(1e-4));
  }
  NodePtr body;
  nn::Linear head{nullptr};
  Tensor tied;
  bool uses_sgd = false;
};

TEST(RandomModels, TrainAsUnsharded) {
  std::vector<uint64_t> seeds(300);
  std::iota(seeds.begin(), seeds.end(), 0);
  const auto all = strategies();
  double worst = 0;
  for (const uint64_t seed : sweep(seeds, 20)) {
    const auto& strategy = all[seed % all.size()];
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + strategy.name);
    const auto difference = compare_training({"random", [seed] { return std::make_shared<RandomModel>(seed); }}, strategy);
    EXPECT_LE(difference.loss, 1e-5);
    EXPECT_LE(difference.evaluation, 1e-5);
    EXPECT_LE(difference.autocast, kToleranceOfAutocast);
    EXPECT_LE(difference.parameters, 1e-5) << difference.worst;
    EXPECT_EQ(difference.leaked_bytes, 0);
    EXPECT_EQ(difference.leaked_graphs, 0);
    EXPECT_EQ(difference.leaked_groups, 0);
    worst = std::max({worst, difference.loss, difference.parameters});
  }
  RecordProperty("difference", std::to_string(worst));
}

} // namespace
} // namespace tessera::testing::random_models_test
