#include <ATen/core/Tensor.h>
#include <tessera/dtensor/debug.h>
#include <torch/library.h>

#include <functional>

#include "op_cases.h"

namespace tessera::testing::ops_test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

std::string label(const Op& op, const std::vector<Placement>& placements) {
  std::string text = op.name + " of";
  for (size_t i = 0; i < placements.size(); ++i)
    text += " " + c10::str(c10::IntArrayRef(op.shapes[i])) + " " + to_string(placements[i]);
  return text;
}

/// Forward and backward on these placements against the plain operator.
void check(const Op& op, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  SCOPED_TRACE(label(op, placements));
  Tensors plain, sharded;
  for (size_t i = 0; i < op.shapes.size(); ++i) {
    const auto whole = values(op.shapes[i], static_cast<int64_t>(i));
    plain.push_back(whole.clone().set_requires_grad(op.differentiable));
    sharded.push_back(make(whole, mesh, {placements[i]}).set_requires_grad(op.differentiable));
  }
  const auto expected = op.run(plain);
  Tensor actual;
  ASSERT_NO_THROW(actual = op.run(sharded));
  ASSERT_TRUE(is_dtensor(actual));
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.strides(), expected.strides());
  const auto full = whole_of(actual);
  EXPECT_TENSORS_CLOSE(full, expected);
  if (!op.differentiable) return;
  const auto weight = values(expected.sizes().vec(), 5).to(expected.dtype());
  (expected * weight).sum().backward();
  ASSERT_NO_THROW((full * weight.to(full.device())).sum().backward());
  for (size_t i = 0; i < plain.size(); ++i) {
    ASSERT_EQ(sharded[i].grad().defined(), plain[i].grad().defined());
    if (!plain[i].grad().defined()) continue;
    EXPECT_TENSORS_CLOSE(whole_of(sharded[i].grad()), plain[i].grad()) << "gradient " << i;
    const auto wanted = is_partial(placements[i]) ? Placement(Replicate{}) : placements[i];
    EXPECT_EQ(DTensor(sharded[i].grad()).placements(), Placements{wanted}) << "gradient " << i;
  }
}

/// Every product of Replicate, Shard, RaggedShard and Partial over the inputs (a seeded subset of large ones).
void check_all(const std::vector<Op>& ops, size_t count) {
  const auto mesh = line_mesh();
  for (const auto& op : ops) {
    std::vector<std::vector<Placement>> products{{}};
    for (const auto& sizes : op.shapes) {
      auto choices = whole_placements(sizes, mesh.size());
      for (const auto& partial : partials()) choices.push_back(partial);
      std::vector<std::vector<Placement>> longer;
      for (const auto& product : products) {
        for (const auto& choice : choices) {
          longer.push_back(product);
          longer.back().push_back(choice);
        }
      }
      products = std::move(longer);
    }
    for (const auto& placements : sweep(products, count)) check(op, mesh, placements);
  }
}

TEST(Ops, Pointwise) { check_all(pointwise_ops(), 16); }
TEST(Ops, Reductions) { check_all(reduction_ops(), 10); }
TEST(Ops, Matrices) { check_all(matrix_ops(), 32); }
TEST(Ops, Shapes) { check_all(shape_ops(), 16); }
TEST(Ops, Networks) { check_all(network_ops(), 12); }

TEST(Ops, TwoMeshDims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"replicate", "shard"});
  const auto a = values({5, 3}, 1), b = values({3, 4}, 2);
  std::vector<Placements> all;
  const std::vector<Placement> single{Replicate{}, Shard{0}, Shard{1}, Partial{}};
  for (const auto& x : single) {
    for (const auto& y : single) all.push_back({x, y});
  }
  for (const auto& p : all) {
    for (const auto& q : all) {
      SCOPED_TRACE(to_string(p) + " x " + to_string(q));
      const auto x = make(a, mesh, p), y = make(b, mesh, q);
      EXPECT_TENSORS_CLOSE(whole_of(x.mm(y)), a.mm(b));
      EXPECT_TENSORS_CLOSE(whole_of((x * make(a, mesh, q)).mean(0)), (a * a).mean(0));
    }
  }
}

TEST(Ops, ScalarsAndComparisons) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({1}, mesh.size())) {
    EXPECT_EQ(make(torch::tensor({2.5}), mesh, {placement}).item<double>(), 2.5) << to_string(placement);
  }
  EXPECT_EQ(make(torch::tensor(6.0), mesh, {Partial{}}).item<double>(), 6.0);
  EXPECT_TRUE(make(torch::tensor(6.0), mesh, {Partial{}}).is_nonzero());
  const auto whole = values({5, 3}, 1);
  auto other = whole.clone();
  other[4][2] += 1;
  for (const auto& a : whole_placements({5, 3}, mesh.size())) {
    for (const auto& b : whole_placements({5, 3}, mesh.size())) {
      EXPECT_TRUE(make(whole, mesh, {a}).equal(make(whole, mesh, {b})));
      EXPECT_FALSE(make(whole, mesh, {a}).equal(make(other, mesh, {b})));
      EXPECT_TRUE(make(whole, mesh, {a}).allclose(make(whole, mesh, {b})));
    }
  }
}

TEST(Ops, Embedding) {
  const auto mesh = line_mesh();
  const auto indices = torch::arange(6).remainder(5).view({2, 3});
  for (const auto& weight_place : whole_placements({5, 4}, mesh.size())) {
    for (const auto& index_place : whole_placements({2, 3}, mesh.size())) {
      SCOPED_TRACE(to_string(weight_place) + " " + to_string(index_place));
      auto plain = values({5, 4}, 1).requires_grad_();
      auto weight = make(plain.detach(), mesh, {weight_place}).set_requires_grad(true);
      const auto expected = torch::embedding(plain, indices);
      const auto actual = whole_of(torch::embedding(weight, make(indices, mesh, {index_place})));
      EXPECT_TENSORS_CLOSE(actual, expected);
      (expected * 2).sum().backward();
      (actual * 2).sum().backward();
      EXPECT_TENSORS_CLOSE(whole_of(weight.grad()), plain.grad());
    }
  }
}

TEST(Ops, EmbeddingInATableSplitByRowsGathersNoTable) {
  const auto mesh = line_mesh();
  const auto plain = values({7, 4}, 1);
  const auto table = make(plain, mesh, {Shard{0}});
  const auto indices = torch::arange(-3, 3).remainder(7).view({2, 3});
  const LogRedistributions log;
  const auto found = torch::embedding(table, make(indices, mesh, {Replicate{}}));
  EXPECT_TRUE(log.records().empty());
  EXPECT_EQ(DTensor(found).placements()[0], Placement(Partial{Partial::Op::kMask}));
  EXPECT_TENSORS_EQUAL(whole_of(found), torch::embedding(plain, indices));
  // A device finds a wrong index later, and in its own words.
  if (!tests_the_cpu()) return;
  for (const int64_t wrong : {-1, 7}) { // on every rank, also where the neighbour of its rows is asked for
    EXPECT_THROWS_WITH(torch::embedding(table, make(torch::full({2}, wrong), mesh, {Replicate{}})), "out of range");
  }
}

TEST(Ops, AMaskPartialStaysOneWhereElementsKeepTheirRankAndIsASumElsewhere) {
  const auto mesh = line_mesh();
  const Placement mask = Partial{Partial::Op::kMask}, sum = Partial{};
  const auto plain = values({6, 4}, 1), other = values({6, 4}, 2);
  const auto masked = make(plain, mesh, {mask}), summed = make(other, mesh, {sum}), whole = make(other, mesh, {Replicate{}});
  const LogRedistributions log;
  const std::vector<std::tuple<Tensor, Placement, Tensor>> results{
      {masked.t().reshape({2, 12})[1], mask, plain.t().reshape({2, 12})[1]},
      {masked.mul(whole).neg().div(2), mask, plain.mul(other).neg().div(2)},
      {masked.to(torch::kFloat), mask, plain.to(torch::kFloat)},
      {torch::cat({masked, masked}), mask, torch::cat({plain, plain})},
      {torch::cat({masked, summed}), sum, torch::cat({plain, other})},
      {torch::cat({summed, masked}), sum, torch::cat({other, plain})},
      {masked.add(summed), sum, plain.add(other)},
      {masked.add(masked), sum, plain.add(plain)},
      {masked.sum(0), sum, plain.sum(0)},
      {masked.mm(whole.t()), sum, plain.mm(other.t())}};
  EXPECT_TRUE(log.records().empty());
  for (const auto& [actual, placement, expected] : results) {
    SCOPED_TRACE(::testing::Message() << to_string(placement) << " " << expected.sizes());
    EXPECT_EQ(DTensor(actual).placements()[0], placement);
    EXPECT_TENSORS_CLOSE(whole_of(actual), expected);
  }
  EXPECT_TENSORS_CLOSE(whole_of(masked.exp()), plain.exp());
}

TEST(Ops, AMaskPartialLiesBesideASum) {
  if (world_size() != 4) GTEST_SKIP() << "a 2x2 mesh";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"a", "b"});
  const Placement mask = Partial{Partial::Op::kMask}, sum = Partial{};
  const auto plain = values({6, 4}, 1);
  const auto mixed = make(plain, mesh, {mask, sum});
  for (const auto& to : {Placements{Replicate{}, Replicate{}}, Placements{Shard{0}, Shard{1}}, Placements{sum, Shard{0}},
                         Placements{Replicate{}, mask}}) {
    EXPECT_TENSORS_CLOSE(mixed.redistribute(to).full_tensor(), plain);
  }
  const LogRedistributions log;
  EXPECT_EQ(mixed.redistribute({sum, sum}).placements(), (Placements{sum, sum}));
  EXPECT_TRUE(log.records().empty());
  const CountCollectives collectives;
  EXPECT_TENSORS_CLOSE(mixed.redistribute({Replicate{}, Replicate{}}).local(), plain);
  EXPECT_EQ(collectives.total_calls(), 1); // the sum over both mesh dims at once
  const auto table = make(plain, mesh, {Shard{0}, sum});
  EXPECT_TENSORS_CLOSE(whole_of(torch::embedding(table, make(torch::arange(6), mesh, {Replicate{}, Replicate{}}))), plain);
}

TEST(Ops, CastsThatWrapAroundKeepNoOrder) {
  const auto mesh = line_mesh();
  for (const auto op : {Partial::Op::kMin, Partial::Op::kMax}) {
    const auto own = torch::tensor({-1 * mesh.local_rank(), 255 + mesh.local_rank()}).to(mesh.device());
    const auto parts = from_local(own, mesh, {Partial{op}});
    const auto whole = parts.full_tensor();
    for (const auto dtype : {torch::kBool, torch::kByte, torch::kChar, torch::kDouble}) {
      EXPECT_TENSORS_EQUAL(whole_of(parts.to(dtype)), whole.to(dtype));
    }
  }
}

TEST(Ops, ResultsLieInMemoryAsTheirArguments) {
  const auto mesh = line_mesh();
  const auto plain = values({6, 4}, 1).t().to(twin_device());
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    const auto ragged = std::get_if<RaggedShard>(&placement);
    if (ragged && ragged->dim > 0) continue; // its transpose moves
    const auto sharded = make(plain.t(), mesh, {placement}).t();
    for (const auto& run : std::vector<std::function<Tensor(Tensor)>>{
             [](const Tensor& t) { return t.relu(); }, [](const Tensor& t) { return t.abs(); },
             [](const Tensor& t) { return t.exp(); }, [](const Tensor& t) { return torch::where(t > 1, t, -t); }}) {
      EXPECT_EQ(run(sharded).strides(), run(plain).strides());
      EXPECT_TENSORS_EQUAL(whole_of(run(sharded).t().reshape({24})), run(plain).t().reshape({24}));
    }
    torch::manual_seed(3);
    const auto expected = torch::rand_like(plain.relu());
    torch::manual_seed(3);
    EXPECT_TENSORS_EQUAL(whole_of(torch::rand_like(sharded.relu())), expected);
  }
}

/// For an operator that the library registers kernels of in front of all devices'.
TEST(Ops, AKernelOfARegisteredDeviceServesItsPlainTensors) {
  if (test_device_type() != at::kPrivateUse1) GTEST_SKIP() << "needs a registered device";
  const auto rows = torch::arange(3).to(test_device());
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("one_hot", [](const Tensor& self, int64_t) { return self + 7; });
  EXPECT_TENSORS_EQUAL(torch::one_hot(rows, 3), torch::arange(3) + 7);
  EXPECT_TENSORS_EQUAL(whole_of(torch::one_hot(make(torch::arange(3), line_mesh(), {Shard{0}}), 3)), torch::eye(3, torch::kLong));
}

TEST(Ops, PadsThatDoNotFitAreErrors) {
  const auto mesh = line_mesh();
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({5}, 1), mesh, {Shard{0}}), {1, 1, 1, 1}),
                     "4 pads for a tensor of 1 dims");
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({}, 1), mesh, {Replicate{}}), {1, 2}), "2 pads for a tensor of 0 dims");
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({5}, 1), mesh, {Shard{0}}), {1}), "1 pads for a tensor of 1 dims");
}

/// Operators along a dim, of one tensor.
std::vector<std::pair<std::string, std::function<void(const Tensor&)>>> calls_along_a_dim() {
  return {
      {"glu", [](const Tensor& x) { torch::glu(x); }},
      {"cross", [](const Tensor& x) { torch::linalg_cross(x, x); }},
      {"select_scatter", [](const Tensor& x) { torch::select_scatter(x, x, 0, 0); }},
      {"slice_scatter", [](const Tensor& x) { torch::slice_scatter(x, x, 0); }},
      {"diagonal_scatter", [](const Tensor& x) { torch::diagonal_scatter(x, x); }},
      {"unfold", [](const Tensor& x) { x.unfold(0, 1, 1); }},
      {"flip", [](const Tensor& x) { x.flip(0); }},
      {"roll", [](const Tensor& x) { x.roll(1, 0); }},
      {"cumsum", [](const Tensor& x) { x.cumsum(0); }},
      {"logcumsumexp", [](const Tensor& x) { x.logcumsumexp(-1); }},
      {"sort", [](const Tensor& x) { x.sort(0); }},
      {"topk", [](const Tensor& x) { x.topk(1); }},
      {"softmax", [](const Tensor& x) { x.softmax(0); }},
      {"gather", [](const Tensor& x) { x.gather(0, torch::zeros_like(x, torch::kLong)); }},
      {"index_select", [](const Tensor& x) { x.index_select(0, torch::zeros_like(x, torch::kLong)); }},
      {"index_fill", [](const Tensor& x) { x.index_fill(0, torch::zeros_like(x, torch::kLong), 1); }},
      {"renorm", [](const Tensor& x) { x.renorm(2, 0, 1); }},
      {"transpose", [](const Tensor& x) { x.transpose(0, -1); }},
      {"cat",
       [](const Tensor& x) {
         torch::cat({x, x});
       }},
      {"tril", [](const Tensor& x) { x.tril(); }},
      {"diag_embed", [](const Tensor& x) { x.diag_embed(); }},
      {"trace", [](const Tensor& x) { x.trace(); }},
      {"select", [](const Tensor& x) { x.select(0, 0); }},
      {"slice", [](const Tensor& x) { x.slice(0); }},
      {"split", [](const Tensor& x) { x.split(1); }},
      {"unbind", [](const Tensor& x) { x.unbind(); }},
      {"max", [](const Tensor& x) { x.max(0); }},
      {"kthvalue", [](const Tensor& x) { x.kthvalue(1, 0); }},
      {"layer_norm", [](const Tensor& x) { torch::layer_norm(x, {1}); }},
  };
}

/// A tensor without dims has no dim to name, though LibTorch takes 0 and -1 for some operators: what a plain one refuses is an
/// error.
TEST(Ops, OperatorsAlongADimOfATensorWithoutDims) {
  const auto mesh = line_mesh();
  for (const auto& [name, call] : calls_along_a_dim()) {
    SCOPED_TRACE(name);
    const auto plain = values({}, 1);
    const auto plain_error = error_of([&, &run = call] { run(plain); });
    const auto error = error_of([&, &run = call] { run(make(plain, mesh, {Replicate{}})); });
    EXPECT_EQ(error == "no error", plain_error == "no error") << error << plain_error;
  }
}

/// Of tensors with dims of size 0, and of more ranks than rows: what one rank refuses, all refuse, and only what a plain tensor
/// does.
TEST(Ops, ReductionsWherePartsAreEmpty) {
  using Function = Tensor (*)(const Tensor&, int64_t dim, bool keep);
  const std::pair<const char*, Function> kReductions[]{
      {"amax", [](const Tensor& x, int64_t d, bool keep) { return x.amax(d, keep); }},
      {"amin", [](const Tensor& x, int64_t d, bool keep) { return x.amin(d, keep); }},
      {"aminmax", [](const Tensor& x, int64_t d, bool keep) { return std::get<1>(x.aminmax(d, keep)); }},
      {"argmax", [](const Tensor& x, int64_t d, bool keep) { return x.argmax(d, keep); }},
      {"max", [](const Tensor& x, int64_t d, bool keep) { return std::get<0>(x.max(d, keep)); }},
      {"median", [](const Tensor& x, int64_t d, bool keep) { return std::get<0>(x.median(d, keep)); }},
      {"kthvalue", [](const Tensor& x, int64_t d, bool keep) { return std::get<0>(x.kthvalue(1, d, keep)); }},
      {"mode", [](const Tensor& x, int64_t d, bool keep) { return std::get<0>(x.mode(d, keep)); }},
      {"logsumexp", [](const Tensor& x, int64_t d, bool keep) { return x.logsumexp(d, keep); }},
      {"infinite norm", [](const Tensor& x, int64_t d, bool keep) { return x.norm(INFINITY, {d}, keep); }},
      {"norm of order -1", [](const Tensor& x, int64_t d, bool keep) { return torch::linalg_vector_norm(x, -1, {d}, keep); }},
      {"prod", [](const Tensor& x, int64_t d, bool keep) { return x.prod(d, keep); }},
      {"all", [](const Tensor& x, int64_t d, bool keep) { return x.gt(0).all(d, keep); }},
      {"mean", [](const Tensor& x, int64_t d, bool keep) { return x.mean(d, keep); }},
      {"layer_norm", [](const Tensor& x, int64_t, bool) { return torch::layer_norm(x, {x.size(-1)}); }},
      {"amax of all", [](const Tensor& x, int64_t, bool) { return x.amax(); }},
      {"argmin of all", [](const Tensor& x, int64_t, bool) { return x.argmin(); }},
      {"norm of all", [](const Tensor& x, int64_t, bool) { return x.norm(-INFINITY); }},
  };
  const auto mesh = line_mesh();
  for (const auto& sizes : {std::vector<int64_t>{2, 3}, {2, 0}, {0, 3}, {1, 2}, {5, 0, 2}, {0, 0}}) {
    const auto whole = torch::arange(1.0, 1.0 + static_cast<double>(torch::zeros(sizes).numel()), torch::kDouble).view(sizes);
    for (const auto& [name, function] : kReductions) {
      for (const auto& placement : whole_placements(sizes, mesh.size())) {
        for (int64_t dim = 0; dim < whole.dim(); ++dim) {
          for (const bool keep : {false, true}) {
            SCOPED_TRACE(::testing::Message() << name << " " << dim << " of " << c10::str(sizes) << " " << placement);
            Tensor plain;
            try {
              plain = function(whole, dim, keep);
            } catch (const c10::Error& error) {
              if (!tests_the_cpu()) continue; // a device's kernel may find it later
              const auto run = function;
              EXPECT_THROWS_WITH(run(make(whole, mesh, {placement}), dim, keep), error.what_without_backtrace());
              continue;
            }
            const auto result = function(make(whole, mesh, {placement}), dim, keep);
            EXPECT_TENSORS_CLOSE(DTensor(result).full_tensor(), plain);
          }
        }
      }
    }
  }
}

/// Sums that are too large for the dtype, of means that are not.
TEST(Ops, MeansOfHalvesDoNotOverflow) {
  const auto mesh = line_mesh();
  const auto whole = torch::full({4, 4096}, 5, torch::kHalf);
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    const auto x = Tensor(make(whole, mesh, {placement})), zero = Tensor(make(torch::zeros_like(whole), mesh, {placement}));
    EXPECT_TENSORS_EQUAL(whole_of(x.pow(2).mean(-1, true)), torch::full({4, 1}, 25, torch::kHalf));
    EXPECT_TENSORS_EQUAL(whole_of(torch::mse_loss(x, zero)), torch::full({}, 25, torch::kHalf));
    if (tests_the_cpu()) { // the CPU's kernel resizes the result on its way, which the simulated device refuses
      auto out = Tensor(make(torch::zeros({}, torch::kHalf), mesh, {Replicate{}}));
      at::mse_loss_out(out, x * 0.1, zero);
      EXPECT_TENSORS_CLOSE(whole_of(out), torch::full({}, 0.25, torch::kHalf), 1e-2, 1e-2);
    }
    const auto mixed = torch::mse_loss(x, zero.to(torch::kFloat));
    EXPECT_EQ(mixed.scalar_type(), torch::mse_loss(whole, torch::zeros_like(whole).to(torch::kFloat)).scalar_type());
    const auto leaf = Tensor(make(whole, mesh, {placement})).requires_grad_(true);
    (torch::mse_loss(leaf, zero) * 32768).backward();
    EXPECT_TENSORS_CLOSE(whole_of(leaf.grad()), torch::full_like(whole, 2.0 * 5 * 32768 / (4 * 4096)), 1e-3, 1e-3);
  }
}

TEST(Ops, LossesOfHalfClassesDoNotOverflow) {
  const auto mesh = line_mesh();
  if (mesh.size() == 1) GTEST_SKIP() << "one rank runs LibTorch's kernel, which may";
  const auto target = make(torch::zeros({4096}, torch::kLong), mesh, {Replicate{}});
  for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1})}) {
    const auto x = Tensor(make(torch::full({4096, 4}, -20, torch::kHalf), mesh, {placement}));
    EXPECT_TENSORS_EQUAL(whole_of(torch::nll_loss(x, target)), torch::full({}, 20, torch::kHalf));
  }
}

/// Without an underscore they leave their input alone.
TEST(Ops, DrawsWithoutAnUnderscoreAreNewTensors) {
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    const auto x = Tensor(make(torch::ones({8, 4}), line_mesh(), {placement}));
    const auto likely = Tensor(make(torch::full({8, 4}, 0.5), line_mesh(), {placement}));
    const auto draw = [&](const Tensor& x, const Tensor& p) {
      torch::manual_seed(5);
      return std::vector<Tensor>{at::uniform(x), torch::bernoulli(x, p), at::exponential(x)};
    };
    const auto device = twin_device();
    const auto expected = draw(torch::ones({8, 4}, device), torch::full({8, 4}, 0.5, device)), drawn = draw(x, likely);
    for (size_t i = 0; i < drawn.size(); ++i) EXPECT_TENSORS_EQUAL(whole_of(drawn[i]), expected[i]);
    EXPECT_TENSORS_EQUAL(whole_of(x), torch::ones({8, 4}));
  }
}

/// Each rank's value alone does not tell: -1 is true, and less than 0; a NaN is passed over on the rank that has it.
TEST(Ops, ReductionsOfPartialsAreOfTheirValue) {
  const auto mesh = line_mesh();
  const auto ranks = world_size();
  const auto column = [&](double first) {
    auto values = torch::zeros({ranks, 1});
    values[0][0] = first;
    return Tensor(make(values, mesh, {Shard{0}}));
  };
  EXPECT_EQ(whole_of(column(-1).amax(0).any()).item<bool>(), ranks == 1);
  EXPECT_EQ(whole_of(column(1).amin(0).all()).item<bool>(), ranks == 1);
  const auto nan = column(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(whole_of(nan.sum(0).nansum()).item<double>(), 0);
  const auto one = Tensor(make(torch::ones({1}), mesh, {Replicate{}}));
  EXPECT_EQ(whole_of(torch::fmax(nan.amax(0), one)).item<double>(), 1);
  EXPECT_EQ(whole_of(torch::fmin(nan.amin(0), one)).item<double>(), 1);
  const auto halves = Tensor(from_local(torch::full({1}, 0.5, test_device()), mesh, {Partial{}}));
  EXPECT_EQ(whole_of(halves.sum(at::kLong)).item<int64_t>(), ranks / 2);
}

/// A RaggedShard takes the dims that are named as one.
TEST(Ops, ReductionsThatNameEveryDim) {
  const auto mesh = line_mesh();
  const std::vector<int64_t> both{0, 1}, backwards{-1, 0};
  const std::vector<std::function<Tensor(const Tensor&)>> reductions{
      [&](const Tensor& x) { return x.sum(both); },
      [&](const Tensor& x) { return x.nansum(backwards); },
      [&](const Tensor& x) { return x.mean(backwards); },
      [&](const Tensor& x) { return x.amax(both); },
      [&](const Tensor& x) { return x.amin(both); },
      [&](const Tensor& x) { return x.norm(2, both); },
      [&](const Tensor& x) { return torch::linalg_vector_norm(x, INFINITY, both); },
      [&](const Tensor& x) { return x.count_nonzero(both); },
      [&](const Tensor& x) { return torch::any(x.gt(2), both); },
      [&](const Tensor& x) { return torch::all(x.gt(0), both); }};
  const auto whole = values({4, 3}, 1);
  for (const auto& placement : whole_placements({4, 3}, mesh.size())) {
    for (size_t i = 0; i < reductions.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << i << " of " << placement);
      EXPECT_TENSORS_CLOSE(whole_of(reductions[i](make(whole, mesh, {placement}))), reductions[i](whole));
    }
  }
}

/// The parts of a rank would fit.
TEST(Ops, SizesThatDifferInASplitDimAreErrors) {
  const auto mesh = line_mesh();
  const auto ranks = mesh.size();
  if (ranks == 1) GTEST_SKIP() << "nothing is split";
  auto x = Tensor(make(torch::zeros({4, 2 * ranks}), mesh, {Shard{1}}));
  const auto rows = Tensor(make(torch::tensor({0, 1}), mesh, {Replicate{}}));
  const auto source = Tensor(make(torch::ones({2, 2}), mesh, {Replicate{}}));
  const auto text = c10::str("the shape [2, 2] of the source differs from that of the tensor, [4, ", 2 * ranks, "], in another");
  EXPECT_THROWS_WITH(x.index_add_(0, rows, source), text);
  EXPECT_THROWS_WITH(x.index_copy_(0, rows, source), text);
  EXPECT_THROWS_WITH(x.index_reduce_(0, rows, source, "prod"), text);
  EXPECT_THROWS_WITH(x.index_add(0, rows, source), text);
  const auto a = Tensor(make(torch::eye(2).expand({2 * ranks, 2, 2}), mesh, {Shard{0}}));
  const auto b = Tensor(make(torch::ones({2, 2, 2}), mesh, {Replicate{}}));
  EXPECT_THROWS_WITH(torch::linalg_solve_triangular(a, b, /*upper=*/true), "must match the size");
}

TEST(Ops, MemoryFormatsWhereDimsAreMerged) {
  const auto mesh = line_mesh();
  constexpr auto kFormat = at::MemoryFormat::ChannelsLast;
  const auto whole = values({2, 3, 2, 2}, 1);
  for (const auto& placement : whole_placements({2, 3, 2, 2}, mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    const auto x = Tensor(make(whole, mesh, {placement}));
    const Tensor results[]{x.clone(kFormat), x.to(torch::kFloat, false, false, kFormat), torch::zeros_like(x, {}, kFormat)};
    const Tensor expected[]{whole, whole.to(torch::kFloat), torch::zeros_like(whole)};
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(results[i].is_contiguous(kFormat)) << i;
      if (mesh.size() > 1) EXPECT_EQ(DTensor(results[i]).placements()[0], placement) << i;
      EXPECT_TENSORS_EQUAL(whole_of(results[i]), expected[i]) << i;
    }
  }
}

/// CUDA's kernels leave the buffer without elements, and do not read it.
TEST(Ops, LogSigmoidWithoutABuffer) {
  auto plain = values({5, 3}, 1).requires_grad_();
  const auto expected = torch::log_sigmoid(plain);
  expected.sum().backward();
  const auto key = tests_the_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  torch::Library library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library.impl("log_sigmoid_forward", [](const Tensor& x) { return std::tuple(x.sigmoid().log(), at::empty({0}, x.options())); });
  library.impl("log_sigmoid_backward",
               [](const Tensor& gradient, const Tensor& x, const Tensor&) { return gradient * (1 - x.sigmoid()); });
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{})}) {
    SCOPED_TRACE(to_string(placement));
    auto leaf = Tensor(make(plain.detach(), line_mesh(), {placement})).requires_grad_();
    const auto result = torch::log_sigmoid(leaf);
    EXPECT_TENSORS_CLOSE(whole_of(result.detach()), expected.detach());
    result.sum().backward();
    EXPECT_TENSORS_CLOSE(whole_of(leaf.grad()), plain.grad());
  }
}

/// Where this rank's part is computed by a kernel of ours, too.
TEST(Ops, OutArgumentsAreWritten) {
  const auto mesh = line_mesh();
  const auto table = torch::arange(15).reshape({5, 3}).to(torch::kFloat), indices = torch::tensor({4, 0, 2});
  const auto out = [&](const std::vector<int64_t>& sizes, at::ScalarType dtype, const Placement& placement) {
    return Tensor(make(torch::full(sizes, 1, dtype), mesh, {placement}));
  };
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    auto rows = out({3, 3}, torch::kFloat, Replicate{});
    at::embedding_out(rows, Tensor(make(table, mesh, {placement})), Tensor(make(indices, mesh, {Replicate{}})));
    EXPECT_TENSORS_EQUAL(whole_of(rows), table.index_select(0, indices));

    auto kept = out({5, 3}, torch::kFloat, placement), mask = out({5, 3}, torch::kBool, placement);
    torch::manual_seed(5);
    const auto expected = at::native_dropout(table.to(twin_device()), 0.5, true);
    torch::manual_seed(5);
    at::native_dropout_out(kept, mask, Tensor(make(table, mesh, {placement})), 0.5, true);
    EXPECT_TENSORS_EQUAL(whole_of(kept), std::get<0>(expected));
    EXPECT_TENSORS_EQUAL(whole_of(mask), std::get<1>(expected));
  }
}

/// Unlike other reductions, which take them for all dims.
TEST(Ops, AnyAndAllOfNoDimsReduceNothing) {
  const auto whole = torch::tensor({{0, 1, -1}, {0, 0, 2}});
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    const auto x = Tensor(make(whole, line_mesh(), {placement}));
    EXPECT_TENSORS_EQUAL(whole_of(torch::any(x, at::IntArrayRef{})), whole != 0);
    EXPECT_TENSORS_EQUAL(whole_of(torch::all(x, at::IntArrayRef{}, /*keepdim=*/true)), whole != 0);
  }
}

TEST(Ops, CopiesOfViewsShareNoMemory) {
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    const auto x = Tensor(make(torch::ones({4, 4}), line_mesh(), {placement}));
    at::view_copy(x, {4, 2, 2}).mul_(2);
    EXPECT_TENSORS_EQUAL(whole_of(x), torch::ones({4, 4}));
  }
}

TEST(Ops, RefuseWhatPlainTensorsDoAndListsAsOut) {
  const auto mesh = line_mesh();
  const auto x = Tensor(make(torch::ones({4, 4}), mesh, {Shard{0}})),
             out = Tensor(make(torch::ones({4, 4}), mesh, {Replicate{}}));
  EXPECT_THROWS_WITH(x.slice(0, 0, 4, 0), "step must be positive");
  EXPECT_THROWS_WITH(at::_foreach_mul_out({out}, {x}, 2.0), "a list of DTensors cannot be its out=");
}

} // namespace
} // namespace tessera::testing::ops_test
