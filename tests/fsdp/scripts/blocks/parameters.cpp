// Blocks with parameters of their own: shapes, dtypes, and what is computed from parameters alone.
#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {
namespace {

namespace F = torch::nn::functional;

struct Scalars : Block {
  explicit Scalars(Draw&)
      : scale(register_parameter("scale", torch::full({}, 0.9))), shift(register_parameter("shift", torch::full({}, 0.3))) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return x * scale + shift; }
  Tensor scale, shift;
};

struct Complex : Block {
  explicit Complex(Draw&)
      : scale(register_parameter("scale", torch::randn({3}, torch::kComplexDouble) * 0.5)),
        mix(register_parameter("mix", torch::randn({5, 3}, torch::kComplexDouble) * 0.3)) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto z = torch::view_as_complex(x.to(torch::kDouble).reshape({x.size(0), 3, 2}).contiguous());
    z = z * scale + z.matmul(mix.t()).mean(1, true);
    return torch::view_as_real(z).reshape(x.sizes()).to(x.scalar_type());
  }
  Tensor scale, mix;
};

/// A frozen bfloat16, a float and a double one in one group.
struct MixedDtypes : Block {
  explicit MixedDtypes(Draw&)
      : gain(register_parameter("gain", torch::randn({kWidth}).to(torch::kBFloat16), /*requires_grad=*/false)),
        down(register_parameter("down", torch::randn({kWidth, 3}, torch::kFloat) * 0.3)),
        up(parameter("up", {3, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto y = x.mul(gain.to(torch::kDouble)).matmul(down.to(torch::kDouble)).to(x.scalar_type()).matmul(up);
    return x + y.tanh(); // bounds what float rounds
  }
  Tensor gain, down, up;
};

struct LowRank : Block {
  explicit LowRank(Draw&) : a(parameter("a", {kWidth, 2})), b(parameter("b", {2, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return x + F::linear(x, a.matmul(b)); }
  Tensor a, b;
};

struct Adapter : Block {
  explicit Adapter(Draw&)
      : base(register_module("base", torch::nn::Linear(kWidth, kWidth))),
        a(parameter("a", {1, kWidth})),
        b(parameter("b", {kWidth, 1})),
        gain(parameter("gain", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return torch::linear(x, base->weight + b.mm(a), base->bias).tanh() * (1 + gain);
  }
  torch::nn::Linear base;
  Tensor a, b, gain;
};

/// Beside numbers that come first, and constants of their shape.
struct Gated : Block {
  explicit Gated(Draw&) : weight(parameter("weight", {kWidth, kWidth})), gate(parameter("gate", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return (x * (1 - gate)).tanh() + F::linear(x, 0.2 * torch::ones_like(weight) - weight).tanh();
  }
  Tensor weight, gate;
};

struct WeightNorm : Block {
  explicit WeightNorm(Draw&) : direction(parameter("direction", {kWidth, kWidth})), length(parameter("length", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return torch::einsum("bd,ed->be", {x, direction / direction.norm() * length.unsqueeze(1)});
  }
  Tensor direction, length;
};

/// A weight that another weight makes.
struct HyperNetwork : Block {
  explicit HyperNetwork(Draw&) : code(parameter("code", {3})), maker(parameter("maker", {kWidth * kWidth, 3})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return torch::tanh(F::linear(x, maker.matmul(code.tanh()).view({kWidth, kWidth})));
  }
  Tensor code, maker;
};

struct Stacked : Block {
  explicit Stacked(Draw&)
      : a(parameter("a", {kWidth, kWidth})), b(parameter("b", {kWidth, kWidth})), c(parameter("c", {kWidth, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    return torch::matmul(x, torch::stack({a, b, c})).mean(0) + torch::addmm(x, x, c.t(), 0.5, 0.1);
  }
  Tensor a, b, c;
};

struct EmptyParameter : Block {
  explicit EmptyParameter(Draw&)
      : weight(parameter("weight", {kWidth, kWidth})),
        empty(parameter("empty", {0, kWidth})),
        high(parameter("high", {1, kWidth, 2})) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    const auto y = x.matmul(weight.view({-1}).view({kWidth, kWidth}));
    return (y + empty.sum() + high.sum(torch::IntArrayRef({0, 2}))).tanh();
  }
  Tensor weight, empty, high;
};

/// A parameter that no forward uses, and a buffer that every forward writes.
struct Buffered : Block {
  explicit Buffered(Draw&)
      : weight(parameter("weight", {kWidth})),
        unused(parameter("unused", {2, 3})),
        count(register_buffer("count", torch::zeros({kWidth}))) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto y = x + (count.tanh() * weight).to(x.scalar_type());
    count.add_(0.1);
    return y;
  }
  Tensor weight, unused, count;
};

/// The value of a parameter decides how often another one is used.
struct DataDependent : Block {
  explicit DataDependent(Draw&)
      : weight(parameter("weight", {kWidth, kWidth})), gain(register_parameter("gain", torch::full({}, 1.7))) {}
  Tensor forward(const Tensor& x, const Tensor&) override {
    auto y = x;
    for (int64_t i = 0; i < repeats(); ++i) y = torch::tanh(F::linear(y, weight)) * gain;
    return y;
  }
  int64_t repeats() const {
    const torch::NoGradGuard no_grad;
    return 1 + static_cast<int64_t>(std::abs(gain.item<double>()) * 2) % 3;
  }
  Tensor weight, gain;
};

} // namespace

std::vector<BlockKind> parameter_blocks() {
  return {block_kind<Scalars>("scalars"),          block_kind<Complex>("complex"),
          block_kind<MixedDtypes>("mixed dtypes"), block_kind<LowRank>("low rank"),
          block_kind<Adapter>("adapter"),          block_kind<Gated>("gated"),
          block_kind<WeightNorm>("weight norm"),   block_kind<HyperNetwork>("hypernetwork"),
          block_kind<Stacked>("stacked"),          block_kind<EmptyParameter>("empty parameter"),
          block_kind<Buffered>("buffered"),        block_kind<DataDependent>("data dependent")};
}

} // namespace tessera::testing::scripts
