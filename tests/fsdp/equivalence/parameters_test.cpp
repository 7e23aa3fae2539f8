// Parameters: frozen, unused, tied, of odd shapes and dtypes.
#include <gtest/gtest.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/fsdp/equivalence/layers.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::parameters_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct FrozenBefore : Layers {
  FrozenBefore() {
    a->weight.requires_grad_(false);
    for (auto& parameter : b->parameters()) parameter.requires_grad_(false);
  }
};

/// Frozen in the second step, unfrozen in the fourth.
struct FrozenForAWhile : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    const bool trains = step < 1 || step > 2;
    a->bias.requires_grad_(trains);
    b->weight.requires_grad_(trains);
    b->bias.requires_grad_(trains);
    return Layers::iterate(step, ranks);
  }
};

/// Which layer is used depends on the step; the same on all ranks.
struct UnusedInAStep : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    skips = step % 2 == 1;
    return Layers::iterate(step, ranks);
  }
  Tensor loss(const Tensor& x) override {
    const auto h = a(x).tanh();
    return (skips ? head->weight.sum() * h.mean() : head(b(h)).mean()).square();
  }
  Allowance allowance() const override { return {2, "the order of the step before predicts a group that this one skips"}; }
  bool skips = false;
};

/// Odd ranks do not use b's bias and head's weight.
struct UnusedOnSomeRanks : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto x = input_of(step, rank);
      const auto h = a(x).tanh();
      const auto y = rank % 2 == 0 ? head(b(h)).square().mean() : (h.mm(b->weight.t()).mean() + head->bias).square().sum();
      const auto part = watched(y / static_cast<double>(ranks.size()));
      part.backward();
      total += part.item<double>();
    }
    return total;
  }
};

/// A residual block whose first layer may be frozen, and an auxiliary output.
struct AuxiliaryBlockImpl : nn::Module {
  explicit AuxiliaryBlockImpl(bool is_first_frozen) {
    for (auto& parameter : first->parameters()) parameter.requires_grad_(!is_first_frozen);
  }
  nn::Linear first = register_module("first", nn::Linear(kWidth, kWidth)),
             last = register_module("last", nn::Linear(kWidth, kWidth)),
             auxiliary = register_module("auxiliary", nn::Linear(kWidth, 1));
};
TORCH_MODULE(AuxiliaryBlock);

/// The losses of even ranks take the auxiliary outputs in; those of odd ranks read them and leave them out.
template <bool kIsFirstFrozen>
struct AuxiliaryLossesOnSomeRanks : CaseModel {
  AuxiliaryLossesOnSomeRanks() {
    for (int64_t i = 0; i < 5; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), AuxiliaryBlock(kIsFirstFrozen)));
    scale = register_parameter("scale", torch::ones({kWidth}));
  }
  std::pair<Tensor, Tensor> forward(Tensor x) {
    auto auxiliary = torch::zeros({}, x.options());
    x = x * scale;
    for (auto& block : blocks) {
      const auto h = block->first(x).tanh();
      auxiliary = auxiliary + block->auxiliary(h).square().mean();
      x = x + block->last(h);
    }
    return {x.square().mean(), auxiliary};
  }
  Tensor loss(const Tensor& x) override { return forward(x).first; }
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto [main, auxiliary] = forward(input_of(step, rank));
      const auto part = watched((rank % 2 == 0 ? main + auxiliary : main) / static_cast<double>(ranks.size()));
      part.backward();
      total += part.template item<double>();
    }
    return total;
  }
  std::vector<AuxiliaryBlock> blocks;
  Tensor scale;
};

/// Frozen and unfrozen again while only some ranks read them: the gradients beside them must stay in their places.
struct FrozenWhereOthersRead : CaseModel {
  FrozenWhereOthersRead() {
    for (int64_t i = 0; i < 6; ++i) small.push_back(register_parameter("small" + std::to_string(i), torch::randn({3})));
    small[2].requires_grad_(false);
    small[4].requires_grad_(false);
  }
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    for (const size_t i : {0, 3}) small[i].requires_grad_(step < 1 || step > 3);
    for (const size_t i : {2, 4}) small[i].requires_grad_(step > 1);
    first_reads_alone = step % 2 == 1;
    double total = 0;
    for (const int64_t rank : ranks) {
      rank_now = rank;
      total += CaseModel::iterate(step, {rank}) / static_cast<double>(ranks.size());
    }
    if (ranks.size() > 1) {
      for (const auto& parameter : parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().div_(static_cast<double>(ranks.size()));
      }
    }
    return total;
  }
  Tensor loss(const Tensor& x) override {
    auto y = (x.slice(1, 0, 3) * small[1] + small[5]).square().mean();
    const bool trains = torch::GradMode::is_enabled(); // without it, every rank runs the same ops on parameters alone
    if (trains && first_reads_alone && rank_now != 0) return y;
    return y + ((small[0] + small[2]).square() + small[3] * small[4]).mean();
  }
  std::vector<Tensor> small;
  bool first_reads_alone = false;
  int64_t rank_now = 0;
};

/// Frozen after the forward: the backward leaves it alone.
struct FrozenBeforeBackward : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    Tensor sum;
    for (const int64_t rank : ranks) {
      const auto part = watched(loss(input_of(step, rank)) / static_cast<double>(ranks.size()));
      sum = sum.defined() ? sum + part : part;
    }
    for (auto& parameter : a->parameters()) parameter.requires_grad_(step % 2 == 0);
    b->weight.requires_grad_(step % 2 == 0);
    sum.backward();
    for (auto& parameter : parameters()) parameter.requires_grad_(true);
    return sum.item<double>();
  }
};

/// Complex weights beside real ones.
struct Complex : CaseModel {
  Complex() {
    spectrum = register_parameter("spectrum", torch::randn({kWidth, 5}, torch::kComplexFloat));
    scale = register_parameter("scale", torch::randn({5}));
    shift = register_parameter("shift", torch::randn({3}, torch::kDouble));
  }
  Tensor loss(const Tensor& x) override {
    const auto y = x.to(torch::kComplexFloat).mm(spectrum);
    return ((at::real(y) * scale).square() + at::imag(y) * at::real(y)).mean() + shift.square().sum().to(torch::kFloat);
  }
  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    return std::make_unique<torch::optim::SGD>(parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  }
  Tensor spectrum, scale, shift;
};

/// One weight in two modules of different groups and twice in one of them.
struct Tied : CaseModel {
  Tied() {
    a = register_module("a", nn::Linear(kWidth, kWidth));
    b = register_module("b", nn::Linear(kWidth, kWidth));
    b->weight = b->register_parameter("again", a->weight);
    head = register_module("head", nn::Linear(kWidth, 1));
    register_parameter("own", a->bias);
  }
  Tensor loss(const Tensor& x) override {
    return head(b(a(x).tanh()).tanh() + x.mm(a->weight)).square().mean() + a->bias.square().sum();
  }
  Allowance allowance() const override { return {4, "b reads a's group, and a is read again after b"}; }
  nn::Linear a{nullptr}, b{nullptr}, head{nullptr};
};

/// Models that compute their weights from parameters of other groups. In evaluation such an op gives a DTensor.
struct WeightNorm : Layers {
  WeightNorm() { lengths = register_parameter("lengths", torch::rand({8}) + 0.5); }
  Tensor loss(const Tensor& x) override {
    const auto direction = a->weight / a->weight.norm(2, {1}, /*keepdim=*/true);
    const auto scale = b->weight.detach().norm() / b->weight.norm();
    return head(b(torch::linear(x, lengths.unsqueeze(1) * direction, a->bias).tanh()) * scale).square().mean();
  }
  Allowance allowance() const override { return {4, "the root's lengths and b's norm are read beside a, b again after it"}; }
  Tensor lengths;
};

/// Adapters of another group are merged into a frozen weight.
struct LoraMerge : Layers {
  LoraMerge() {
    a->weight.requires_grad_(false);
    b->weight.requires_grad_(false);
    down = register_module("down", nn::Linear(nn::LinearOptions(kWidth, 2).bias(false)));
    up = register_parameter("up", torch::randn({8, 2}));
  }
  Tensor loss(const Tensor& x) override {
    const auto merged = a->weight + 0.5 * up.mm(down->weight);
    return head(b(torch::linear(x, merged, a->bias).tanh())).square().mean();
  }
  Allowance allowance() const override { return {4, "a, down and the root are read by one expression"}; }
  nn::Linear down{nullptr};
  Tensor up;
};

/// One group makes the weight of the next layer.
struct HyperNetwork : Layers {
  HyperNetwork() { code = register_parameter("code", torch::randn({1, kWidth})); }
  Tensor loss(const Tensor& x) override {
    const auto made = a(code).tanh(); // of parameters alone, [1, 8]
    return head(b(a(x).tanh() * (1 + made)) + b(made)).square().mean() + made.square().sum();
  }
  Allowance allowance() const override { return {4, "a and b are read in turns"}; }
  Tensor code;
};

/// The head is the scaled weight of the first layer, as in a language model with tied embeddings.
struct TiedAndScaled : Layers {
  TiedAndScaled() { scale = register_parameter("scale", torch::tensor(0.3)); }
  Tensor loss(const Tensor& x) override {
    const auto tied = a->weight * scale.exp() - b->weight.mean();
    return a(x).tanh().mm(tied).square().mean() + head(b(a(x).tanh())).square().mean();
  }
  Allowance allowance() const override { return {4, "a is read before and after b"}; }
  Tensor scale;
};

/// Fewer elements than ranks, none at all, no dims, integers, several dtypes.
struct OddShapes : CaseModel {
  OddShapes() {
    scalar = register_parameter("scalar", torch::tensor(1.5));
    one = register_parameter("one", torch::ones({1}));
    none = register_parameter("none", torch::empty({0, 3}));
    row = register_parameter("row", torch::ones({1, kWidth}));
    tall = register_parameter("tall", torch::randn({7, 1}));
    wide = register_parameter("wide", torch::randn({2, 37}));
    counts = register_parameter("counts", torch::arange(kWidth), /*requires_grad=*/false);
    mask = register_parameter("mask", torch::arange(kWidth).remainder(2).to(torch::kBool), /*requires_grad=*/false);
    twice = register_parameter("twice", torch::randn({3}, torch::kDouble));
    head = register_module("head", nn::Linear(kWidth, 1));
  }
  Tensor loss(const Tensor& x) override {
    const auto y = x * scalar * one + row * counts.to(torch::kFloat) + mask.to(torch::kFloat) + none.sum();
    const auto z = head(y) + tall.mean() + wide.square().sum() + twice.sum().to(torch::kFloat);
    return z.square().mean() * 1e-2;
  }
  Tensor scalar, one, none, row, tall, wide, counts, mask, twice;
  nn::Linear head{nullptr};
};

/// bf16 and fp32 parameters in one group. One step of a bf16 parameter rounds: the mean over ranks must be the same number, so
/// the data are.
struct MixedDtypes : SameDataEverywhere {
  MixedDtypes() {
    low = register_parameter("low", torch::randn({kWidth, 5}).to(torch::kBFloat16));
    high = register_parameter("high", torch::randn({5, 3}));
  }
  Tensor loss(const Tensor& x) override { return x.mm(low.to(torch::kFloat)).tanh().mm(high).square().mean(); }
  Tensor low, high;
};

class Parameters : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Parameters, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Equivalence, Parameters,
    ::testing::ValuesIn(with_all_strategies(
        {equivalence_case<FrozenBefore>("frozen_before_sharding"), equivalence_case<FrozenForAWhile>("frozen_and_unfrozen"),
         equivalence_case<UnusedInAStep>("group_unused_in_a_step"), equivalence_case<UnusedOnSomeRanks>("unused_on_some_ranks"),
         equivalence_case<AuxiliaryLossesOnSomeRanks<false>>("auxiliary_losses_on_some_ranks"),
         equivalence_case<AuxiliaryLossesOnSomeRanks<true>>("auxiliary_losses_on_some_ranks_beside_frozen_layers"),
         equivalence_case<FrozenWhereOthersRead>("frozen_where_others_read"),
         equivalence_case<FrozenBeforeBackward>("frozen_before_backward"), equivalence_case<Complex>("complex"),
         equivalence_case<Tied>("tied"), equivalence_case<WeightNorm>("weight_norm"), equivalence_case<LoraMerge>("lora_merge"),
         equivalence_case<HyperNetwork>("hypernetwork"), equivalence_case<TiedAndScaled>("tied_and_scaled"),
         equivalence_case<OddShapes>("odd_shapes_and_dtypes"), equivalence_case<MixedDtypes>("bf16_and_fp32_in_a_group")})),
    param_name);

} // namespace
} // namespace tessera::testing::parameters_test
