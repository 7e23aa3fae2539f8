// Operators whose rule, or kernel on the parts, needs more than the sweeps of ops_test.cpp to go wrong.
#include <tessera/tests/dtensor/operators/op_cases.h>

namespace tessera::testing::rules_test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// `run` on every placement of `whole` but Partial against the plain one.
void check_placements(const Tensor& whole, const std::function<Tensor(const Tensor&)>& run) {
  const auto mesh = line_mesh();
  const auto expected = run(whole);
  for (const auto& placement : whole_placements(whole.sizes().vec(), mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    EXPECT_TENSORS_CLOSE(whole_of(run(make(whole, mesh, {placement}))), expected);
  }
}

TEST(Rules, BernoulliOfAProbability) {
  const auto draw = [](const Tensor& x) {
    torch::manual_seed(5);
    return torch::bernoulli(x, 0.25);
  };
  check_placements(torch::full({8, 4}, 3.0F, twin_device()), draw);
}

TEST(Rules, ChannelShuffleOfImagesOfAnyDims) {
  for (const auto& sizes :
       {std::vector<int64_t>{2, 4, 3}, std::vector<int64_t>{2, 4, 3, 2}, std::vector<int64_t>{2, 4, 2, 3, 2}}) {
    check_placements(values(sizes, 1), [](const Tensor& x) { return torch::channel_shuffle(x, 2); });
  }
}

TEST(Rules, MaxPool1dWithAndWithoutAGraph) {
  const auto pool = [](const Tensor& x) { return torch::max_pool1d(x, 2, 1); };
  check_placements(values({4, 2, 6}, 1), pool);
  check_placements(values({2, 6}, 1), pool);
  const auto mesh = line_mesh();
  const auto whole = values({4, 2, 6}, 1);
  auto plain = whole.clone().requires_grad_();
  pool(plain).square().sum().backward();
  auto x = Tensor(make(whole, mesh, {Shard{0}})).requires_grad_();
  whole_of(pool(x).square().sum()).backward();
  EXPECT_TENSORS_CLOSE(whole_of(x.grad()), plain.grad());
  const c10::InferenceMode inference;
  EXPECT_TENSORS_EQUAL(whole_of(pool(make(whole, mesh, {Shard{0}}))), pool(whole));
  EXPECT_TENSORS_EQUAL(pool(whole), pool(plain.detach()));
}

TEST(Rules, GroupedConvolutionsOfAnEmptyBatch) {
  const auto mesh = line_mesh();
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    SCOPED_TRACE(to_string(placement));
    const auto x = Tensor(make(torch::zeros({0, 4, 3, 3}), mesh, {placement})).requires_grad_();
    const auto weight = Tensor(make(torch::ones({4, 2, 3, 3}), mesh, {placement})).requires_grad_();
    const auto bias = Tensor(make(torch::ones({4}), mesh, {placement})).requires_grad_();
    const auto result = torch::conv2d(x, weight, bias, 1, 1, 1, 2);
    const auto gradients = torch::autograd::grad({result.sum()}, {x, weight, bias});
    EXPECT_EQ(gradients[0].sizes(), x.sizes());
    EXPECT_TENSORS_EQUAL(whole_of(gradients[1]), torch::zeros({4, 2, 3, 3}));
    EXPECT_TENSORS_EQUAL(whole_of(gradients[2]), torch::zeros({4}));
  }
}

TEST(Rules, ResultsOfConvolutionsByChannelsLastWeights) {
  const auto mesh = line_mesh();
  const auto image = values({2, 4, 5, 5}, 1).to(torch::kFloat), weight = values({6, 4, 3, 3}, 2).to(torch::kFloat);
  const auto last = weight.contiguous(at::MemoryFormat::ChannelsLast);
  const auto expected = torch::conv2d(image, last);
  ASSERT_TRUE(expected.is_contiguous(at::MemoryFormat::ChannelsLast));
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    SCOPED_TRACE(to_string(placement));
    const auto filter = Tensor(make(weight, mesh, {Replicate{}})).contiguous(at::MemoryFormat::ChannelsLast);
    const auto result = torch::conv2d(Tensor(make(image, mesh, {placement})), filter);
    EXPECT_EQ(result.strides(), expected.strides());
    EXPECT_TENSORS_CLOSE(whole_of(result), expected);
  }
}

TEST(Rules, MasksThatDoNotFitAreErrors) {
  const auto mesh = line_mesh();
  const auto put = [&](const Tensor& x, const Tensors& indices) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& index : indices) list.push_back(Tensor(make(index, mesh, {Replicate{}})));
    x.index_put_(list, Tensor(make(torch::ones({}), mesh, {Replicate{}})));
  };
  const auto mask = torch::tensor({true, false, true}), rows = torch::tensor({0, 1});
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    SCOPED_TRACE(to_string(placement));
    const auto line = Tensor(make(torch::zeros({5}), mesh, {placement}));
    const auto matrix = Tensor(make(torch::zeros({3, 5}), mesh, {placement}));
    if (tests_the_cpu()) { // a device finds them later
      EXPECT_THROWS_WITH(put(line, {mask}),
                         "The shape of the mask [3] at index 0 does not match the shape of the indexed tensor [5] at index 0");
      EXPECT_THROWS_WITH(put(matrix, {rows, mask}),
                         "The shape of the mask [3] at index 0 does not match the shape of the indexed tensor [3, 5] at index 1");
      EXPECT_THROWS_WITH(put(line, {rows, rows}), "too many indices for tensor of dimension 1");
    }
    EXPECT_TENSORS_EQUAL(whole_of(line), torch::zeros({5}));
    put(matrix, {mask});
    EXPECT_TENSORS_EQUAL(whole_of(matrix), mask.to(torch::kFloat).unsqueeze(1).expand({3, 5}));
  }
}

TEST(Rules, SolversOfOneMatrixForABatch) {
  const auto mesh = line_mesh();
  const auto a = values({4, 4, 4}, 1) + 9 * torch::eye(4, torch::kDouble);
  for (const auto& sizes :
       {std::vector<int64_t>{4, 3}, std::vector<int64_t>{4, 4}, std::vector<int64_t>{4}, std::vector<int64_t>{4, 4, 2}}) {
    SCOPED_TRACE(c10::IntArrayRef(sizes));
    const auto b = values(sizes, 2);
    for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
      const auto solution = torch::linalg_solve(Tensor(make(a, mesh, {Shard{0}})), Tensor(make(b, mesh, {placement})));
      EXPECT_TENSORS_CLOSE(whole_of(solution), torch::linalg_solve(a, b));
    }
  }
}

TEST(Rules, LdlSolve) {
  const auto mesh = line_mesh();
  const auto square = values({4, 3, 3}, 1);
  const auto [factor, pivots] = torch::linalg_ldl_factor(square + square.mT() + 9 * torch::eye(3, torch::kDouble));
  const auto b = values({4, 3, 2}, 2);
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    const auto part = [&](const Tensor& whole) { return Tensor(make(whole, mesh, {placement})); };
    EXPECT_TENSORS_CLOSE(whole_of(torch::linalg_ldl_solve(part(factor), part(pivots), part(b))),
                         torch::linalg_ldl_solve(factor, pivots, b));
  }
}

TEST(Rules, NllLossOfByteTargets) {
  const auto target = torch::tensor({1, 0, 3, 2}, torch::kByte);
  const auto loss = [&](const Tensor& x) {
    return torch::nll_loss(x, is_dtensor(x) ? Tensor(make(target, line_mesh(), {Replicate{}})) : target);
  };
  check_placements(values({4, 5}, 1), loss);
  auto plain = values({4, 5}, 1).requires_grad_();
  loss(plain).backward();
  auto x = Tensor(make(values({4, 5}, 1), line_mesh(), {Shard{1}})).requires_grad_();
  whole_of(loss(x)).backward();
  EXPECT_TENSORS_CLOSE(whole_of(x.grad()), plain.grad());
}

} // namespace
} // namespace tessera::testing::rules_test
