// Blocks that read their parameters through views, indices and copies.
#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {
namespace {

namespace F = torch::nn::functional;

struct Slices : Block {
  explicit Slices(Draw&)
      : weight(parameter("weight", {kWidth + 5, kWidth})),
        shift(parameter("shift", {kWidth - 1})),
        last(parameter("last", {1})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto y = F::linear(x, weight.slice(0, 0, kWidth)) + x.matmul(weight.slice(0, 5, 5 + kWidth)) * 0.1;
    const auto parts = weight.split(4, 0);
    y = y + torch::cat({x.matmul(parts[0].t()), x.matmul(parts[1].t())}, 1).slice(1, 0, kWidth);
    return (y + torch::cat({shift, last})).tanh();
  }
  Tensor weight, shift, last;
};

/// Writes values of parameters into views of an activation.
struct WritesActivation : Block {
  explicit WritesActivation(Draw&) : gain(parameter("gain", {kWidth})), weight(parameter("weight", {kWidth, 3})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto y = x.clone();
    y.slice(1, 0, 2).mul_(gain.slice(0, 0, 2));
    y.select(1, 1).add_(gain[3]);
    y.slice(1, 3, 6).add_(x.matmul(weight));
    y.select(1, 0).copy_(y.select(1, 5).clone() * gain.select(0, 5));
    return y;
  }
  Tensor gain, weight;
};

struct Indexed : Block {
  explicit Indexed(Draw&) : table(parameter("table", {9, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor& ids) override {
    const auto y = x + table.index_select(0, ids.select(1, 0)) + table.index({ids.select(1, 1)}) * 0.5;
    return y + torch::gather(table, 0, ids.slice(1, 0, 1).expand({ids.size(0), kWidth}));
  }
  Tensor table;
};

struct Expanded : Block {
  explicit Expanded(Draw&) : weight(parameter("weight", {kWidth, kWidth})), bias(parameter("bias", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto weights = weight.t().unsqueeze(0).expand({x.size(0), kWidth, kWidth});
    const auto y = torch::baddbmm(bias, x.unsqueeze(1), weights).squeeze(1);
    return torch::where(y > 0.05, y, y * bias); // not at 0, where an output may lie but for rounding
  }
  Tensor weight, bias;
};

struct Triangle : Block {
  explicit Triangle(Draw&) : weight(parameter("weight", {kWidth, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto upper = weight.triu();
    return x.matmul(upper) * 0.3 + upper.diagonal() * x + weight.max() * 0.1 + weight.flip(0).select(0, 1);
  }
  Tensor weight;
};

struct DetachedAndCloned : Block {
  explicit DetachedAndCloned(Draw&) : weight(parameter("weight", {kWidth, kWidth})), bias(parameter("bias", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto y = x + F::linear(x, weight.detach()) * 0.1 + x * bias.detach().sum() * 0.01;
    return y + F::linear(x, weight.clone(), bias.clone().mul_(0.5)) * 0.1;
  }
  bool reads_beside_gradient() const override { return true; }
  Tensor weight, bias;
};

} // namespace

std::vector<BlockKind> view_blocks() {
  return {block_kind<Slices>("slices"),     block_kind<WritesActivation>("writes activation"),
          block_kind<Indexed>("indexed"),   block_kind<Expanded>("expanded"),
          block_kind<Triangle>("triangle"), block_kind<DetachedAndCloned>("detached and cloned")};
}

} // namespace tessera::testing::scripts
