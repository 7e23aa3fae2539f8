#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <tessera/dtensor/debug.h>

#include <functional>

#include "layouts.h"

namespace tessera::testing {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<std::vector<int64_t>>;

struct Op {
  std::string name;
  Sizes shapes;
  std::function<Tensor(const Tensors&)> run;
  bool differentiable = true;
};

/// Distinct positive values, exact in every Partial of `lay_out`.
Tensor values(const std::vector<int64_t>& sizes, int64_t seed) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(numel, torch::kDouble).mul(7).add(3 * seed).remainder(11).add(1).div(4).view(sizes);
}

const Sizes kSame{{5, 3}, {5, 3}}, kRow{{5, 3}, {3}}, kColumn{{5, 3}, {5, 1}}, kMatrix{{5, 3}}, kCube{{2, 3, 4}};

std::vector<Op> pointwise_ops() {
  std::vector<Op> ops;
  const auto add = [&](std::string name, Sizes shapes, std::function<Tensor(const Tensors&)> run, bool differentiable = true) {
    ops.push_back({std::move(name), std::move(shapes), std::move(run), differentiable});
  };
  for (const auto& shapes : {kSame, kRow, kColumn, Sizes{{5, 3}, {}}, Sizes{{2, 3, 2}, {3, 2}}}) {
    add("add", shapes, [](const Tensors& t) { return t[0].add(t[1], 2); });
    add("sub", shapes, [](const Tensors& t) { return t[0] - t[1]; });
    add("mul", shapes, [](const Tensors& t) { return t[0] * t[1]; });
    add("div", shapes, [](const Tensors& t) { return t[0] / t[1]; });
    add(
        "maximum", shapes, [](const Tensors& t) { return torch::maximum(t[0], t[1]); }, false);
    add(
        "less", shapes, [](const Tensors& t) { return t[0] < t[1]; }, false);
  }
  add("pow", kSame, [](const Tensors& t) { return t[0].pow(t[1]); });
  add("rsub", kMatrix, [](const Tensors& t) { return 1 - t[0]; });
  add("add scalar", kMatrix, [](const Tensors& t) { return t[0] + 1.5; });
  add("mul scalar", kMatrix, [](const Tensors& t) { return t[0] * -2; });
  add("neg", kMatrix, [](const Tensors& t) { return -t[0]; });
  add("exp", kMatrix, [](const Tensors& t) { return t[0].exp(); });
  add("relu", kMatrix, [](const Tensors& t) { return (t[0] - 1).relu(); });
  add("gelu", kMatrix, [](const Tensors& t) { return torch::gelu(t[0]); });
  add("silu", kMatrix, [](const Tensors& t) { return torch::silu(t[0]); });
  add("tanh", kMatrix, [](const Tensors& t) { return t[0].tanh(); });
  add("sigmoid", kMatrix, [](const Tensors& t) { return t[0].sigmoid(); });
  add("sqrt", kMatrix, [](const Tensors& t) { return t[0].sqrt(); });
  add("rsqrt", kMatrix, [](const Tensors& t) { return t[0].rsqrt(); });
  add("abs", kMatrix, [](const Tensors& t) { return (t[0] - 1.1).abs(); });
  add("square", kMatrix, [](const Tensors& t) { return t[0].square(); });
  add("clamp", kMatrix, [](const Tensors& t) { return t[0].clamp(0.6, 2.1); });
  add(
      "isfinite", kMatrix, [](const Tensors& t) { return torch::isfinite(t[0]); }, false);
  add(
      "isnan", kMatrix, [](const Tensors& t) { return torch::isnan(t[0]); }, false);
  add("to float", kMatrix, [](const Tensors& t) { return t[0].to(torch::kFloat); });
  add(
      "to long", kMatrix, [](const Tensors& t) { return t[0].to(torch::kLong); }, false);
  add("clone", kMatrix, [](const Tensors& t) { return t[0].clone(); });
  add("where", {{5, 3}, {5, 3}, {3}}, [](const Tensors& t) { return torch::where(t[0] > 1.2, t[1], t[2]); });
  add("masked_fill", kSame, [](const Tensors& t) { return t[0].masked_fill(t[1] > 1.2, 0.0); });
  add("lerp", kSame, [](const Tensors& t) { return t[0].lerp(t[1], 0.3); });
  add("addcmul", {{5, 3}, {5, 3}, {5, 3}}, [](const Tensors& t) { return t[0].addcmul(t[1], t[2], 0.5); });
  add("addcdiv", {{5, 3}, {5, 3}, {5, 3}}, [](const Tensors& t) { return t[0].addcdiv(t[1], t[2], 0.5); });
  add(
      "zeros_like", kMatrix, [](const Tensors& t) { return torch::zeros_like(t[0]); }, false);
  add(
      "full_like", kMatrix, [](const Tensors& t) { return torch::full_like(t[0], 3); }, false);
  add(
      "new_zeros", kMatrix,
      [](const Tensors& t) {
        return t[0].new_zeros({5, 3});
      },
      false);
  add(
      "new_ones of another shape", kMatrix,
      [](const Tensors& t) {
        return t[0].new_ones({2, 2});
      },
      false);
  add("mse_loss", kSame, [](const Tensors& t) { return (t[0] - t[1]).square().mean(); });
  return ops;
}

std::vector<Op> reduction_ops() {
  std::vector<Op> ops;
  const auto add = [&](const std::string& name, const std::function<Tensor(const Tensor&)>& run, bool differentiable = true) {
    for (const auto& shapes : {kMatrix, kCube, Sizes{{7}}}) {
      ops.push_back({name, shapes, [run](const Tensors& t) { return run(t[0]); }, differentiable});
    }
  };
  add("sum", [](const Tensor& t) { return t.sum(); });
  add("sum 0", [](const Tensor& t) { return t.sum(0); });
  add("sum -1 keep", [](const Tensor& t) { return t.sum(-1, true); });
  add("mean", [](const Tensor& t) { return t.mean(); });
  add("mean 0", [](const Tensor& t) { return t.mean(0); });
  add("mean -1", [](const Tensor& t) { return t.mean(-1, true); });
  add(
      "prod", [](const Tensor& t) { return t.prod(); }, false);
  add(
      "amax", [](const Tensor& t) { return t.amax(); }, false);
  add(
      "amin 0", [](const Tensor& t) { return t.amin(0); }, false);
  add(
      "max", [](const Tensor& t) { return t.max(); }, false);
  add(
      "min", [](const Tensor& t) { return t.min(); }, false);
  add(
      "max dim", [](const Tensor& t) { return std::get<0>(t.max(0)); }, false);
  add(
      "argmax", [](const Tensor& t) { return t.argmax(); }, false);
  add(
      "any", [](const Tensor& t) { return (t > 2.5).any(); }, false);
  add(
      "all 0", [](const Tensor& t) { return (t > 0.5).all(0); }, false);
  add("var", [](const Tensor& t) { return t.var(0, false); });
  add(
      "std", [](const Tensor& t) { return t.std(-1, false); }, false);
  add("norm", [](const Tensor& t) { return t.norm(); });
  add("norm 1", [](const Tensor& t) { return t.norm(1); });
  add("norm 3 dim", [](const Tensor& t) { return t.norm(3, {0}, true); });
  add(
      "norm 0", [](const Tensor& t) { return t.norm(0); }, false);
  add(
      "norm inf", [](const Tensor& t) { return torch::linalg_vector_norm(t, INFINITY); }, false);
  add(
      "norm -inf", [](const Tensor& t) { return torch::linalg_vector_norm(t, -INFINITY); }, false);
  add("norm of norms", [](const Tensor& t) { return torch::stack({t.norm(), t.mul(2).norm()}).norm(); });
  add("softmax", [](const Tensor& t) { return t.softmax(0); });
  add("log_softmax", [](const Tensor& t) { return t.log_softmax(-1); });
  add("cumsum", [](const Tensor& t) { return t.cumsum(0); });
  add(
      "logsumexp", [](const Tensor& t) { return t.logsumexp(-1); }, false);
  return ops;
}

std::vector<Op> matrix_ops() {
  return {
      {"mm", {{5, 3}, {3, 4}}, [](const Tensors& t) { return t[0].mm(t[1]); }},
      {"mm t", {{5, 3}, {4, 3}}, [](const Tensors& t) { return t[0].mm(t[1].t()); }},
      {"addmm", {{4}, {5, 3}, {3, 4}}, [](const Tensors& t) { return torch::addmm(t[0], t[1], t[2], 2, 3); }},
      {"addmm row", {{1, 4}, {5, 3}, {3, 4}}, [](const Tensors& t) { return torch::addmm(t[0], t[1], t[2]); }},
      {"bmm", {{2, 3, 2}, {2, 2, 3}}, [](const Tensors& t) { return t[0].bmm(t[1]); }},
      {"baddbmm", {{2, 3, 3}, {2, 3, 2}, {2, 2, 3}}, [](const Tensors& t) { return torch::baddbmm(t[0], t[1], t[2]); }},
      {"mv", {{5, 3}, {3}}, [](const Tensors& t) { return t[0].mv(t[1]); }},
      {"addmv", {{5}, {5, 3}, {3}}, [](const Tensors& t) { return torch::addmv(t[0], t[1], t[2], 2, 3); }},
      {"addmv of one", {{1}, {5, 3}, {3}}, [](const Tensors& t) { return torch::addmv(t[0], t[1], t[2]); }},
      {"dot", {{7}, {7}}, [](const Tensors& t) { return t[0].dot(t[1]); }},
      {"linear", {{5, 3}, {4, 3}, {4}}, [](const Tensors& t) { return torch::linear(t[0], t[1], t[2]); }},
      {"matmul batch", {{2, 3, 2}, {2, 4}}, [](const Tensors& t) { return t[0].matmul(t[1].add(0)); }},
  };
}

std::vector<Op> shape_ops() {
  std::vector<Op> ops;
  const auto add = [&](std::string name, Sizes shapes, std::function<Tensor(const Tensors&)> run) {
    ops.push_back({std::move(name), std::move(shapes), std::move(run), true});
  };
  add("cat 0", {{5, 3}, {2, 3}}, [](const Tensors& t) { return torch::cat({t[0], t[1]}); });
  add("cat 1", {{5, 3}, {5, 2}}, [](const Tensors& t) { return torch::cat({t[0], t[1]}, 1); });
  add("stack 0", kSame, [](const Tensors& t) { return torch::stack({t[0], t[1]}); });
  add("stack -1", kSame, [](const Tensors& t) { return torch::stack({t[0], t[1]}, -1); });
  add("t", kMatrix, [](const Tensors& t) { return t[0].t() + 0; });
  add("transpose", kCube, [](const Tensors& t) { return t[0].transpose(0, 2) * 2; });
  add("permute", kCube, [](const Tensors& t) { return t[0].permute({2, 0, 1}) * 2; });
  add("view merge", kCube, [](const Tensors& t) { return t[0].view({6, 4}); });
  add("view split", kCube, [](const Tensors& t) { return t[0].view({2, 3, 2, 2}); });
  add("flatten", kCube, [](const Tensors& t) { return t[0].flatten(); });
  add("reshape 4x6", kCube, [](const Tensors& t) { return t[0].reshape({4, 6}); });
  add("reshape of transpose", kMatrix, [](const Tensors& t) { return t[0].t().reshape({15}); });
  add("unsqueeze 0", kMatrix, [](const Tensors& t) { return t[0].unsqueeze(0); });
  add("unsqueeze 1", kMatrix, [](const Tensors& t) { return t[0].unsqueeze(1); });
  add("squeeze", {{1, 5, 1, 3}}, [](const Tensors& t) { return t[0].squeeze(); });
  add("squeeze 0", {{1, 5, 3}}, [](const Tensors& t) { return t[0].squeeze(0); });
  add("squeeze of no one", kMatrix, [](const Tensors& t) { return t[0].squeeze(0); });
  add("expand", {{5, 1}}, [](const Tensors& t) { return t[0].expand({2, 5, 3}); });
  add("slice 0", kMatrix, [](const Tensors& t) { return t[0].slice(0, 1, 4); });
  add("slice 1", kMatrix, [](const Tensors& t) { return t[0].slice(1, 0, 2); });
  add("slice step", kMatrix, [](const Tensors& t) { return t[0].slice(0, 0, 5, 2); });
  add("slice whole", kMatrix, [](const Tensors& t) { return t[0].slice(0); });
  add("narrow", kCube, [](const Tensors& t) { return t[0].narrow(2, 1, 2); });
  add("select 0", kMatrix, [](const Tensors& t) { return t[0].select(0, 2); });
  add("select -1", kMatrix, [](const Tensors& t) { return t[0].select(-1, 1); });
  add("chunk", kCube, [](const Tensors& t) { return t[0].chunk(2, 2)[1] * 1; });
  add("split 0", kMatrix, [](const Tensors& t) { return t[0].split(2, 0)[2] * 1; });
  add("unbind", kMatrix, [](const Tensors& t) { return t[0].unbind(1)[0] * 1; });
  add("diagonal", kMatrix, [](const Tensors& t) { return t[0].diagonal(); });
  add("tril", kMatrix, [](const Tensors& t) { return t[0].tril(); });
  return ops;
}

/// Attention with as many heads of keys as of queries, with groups of queries, and with one key for all; convolutions with and
/// without groups.
std::vector<Op> network_ops() {
  std::vector<Op> ops;
  for (const int64_t key_heads : {4, 2, 1}) {
    const Sizes shapes{{2, 4, 3, 2}, {2, key_heads, 5, 2}, {2, key_heads, 5, 2}};
    const auto attend = [](const Tensors& t, const std::optional<Tensor>& mask, bool causal) {
      return torch::scaled_dot_product_attention(t[0], t[1], t[2], mask, 0.0, causal, std::nullopt, true);
    };
    const auto heads = " with " + std::to_string(key_heads) + " key heads";
    ops.push_back({"attention" + heads, shapes, [attend](const Tensors& t) { return attend(t, std::nullopt, false); }});
    ops.push_back({"causal attention" + heads, shapes, [attend](const Tensors& t) { return attend(t, std::nullopt, true); }});
    auto masked = shapes;
    masked.push_back({3, 5});
    ops.push_back({"masked attention" + heads, masked, [attend](const Tensors& t) { return attend(t, t[3].detach(), false); }});
  }
  const auto convolve = [](int64_t groups) {
    return [groups](const Tensors& t) {
      const auto bias = t.size() > 2 ? std::optional(t[2]) : std::nullopt;
      return torch::convolution(t[0], t[1], bias, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, groups);
    };
  };
  ops.push_back({"conv2d", {{5, 2, 3, 3}, {4, 2, 3, 3}, {4}}, convolve(1)});
  ops.push_back({"conv2d of groups", {{5, 4, 3, 3}, {4, 2, 3, 3}, {4}}, convolve(2)});
  ops.push_back({"conv2d of groups without bias", {{2, 4, 3, 3}, {4, 1, 3, 3}}, convolve(4)});
  ops.push_back({"causal attention without heads", {{2, 3, 4}, {2, 5, 4}, {2, 5, 4}}, [](const Tensors& t) {
                   return torch::scaled_dot_product_attention(t[0], t[1], t[2], std::nullopt, 0.0, true);
                 }});
  ops.push_back({"rms_norm", {{5, 3}, {3}}, [](const Tensors& t) { return torch::rms_norm(t[0], {3}, t[1]); }});
  ops.push_back({"cosine_similarity", kSame, [](const Tensors& t) { return torch::cosine_similarity(t[0], t[1]); }});
  ops.push_back({"diag_embed", {{5, 3}}, [](const Tensors& t) { return torch::diag_embed(t[0]); }});
  ops.push_back({"diag_embed elsewhere", {{5, 3}}, [](const Tensors& t) { return torch::diag_embed(t[0], 1, 0, 2); }});
  ops.push_back({"cross entropy with smoothed labels", {{5, 4}}, [](const Tensors& t) {
                   const auto targets = torch::arange(5).remainder(4);
                   const bool sharded = is_dtensor(t[0]);
                   return torch::cross_entropy_loss(t[0], sharded ? make(targets, line_mesh(), {Replicate{}}) : targets, {},
                                                    at::Reduction::Mean, 2, 0.1);
                 }});
  ops.push_back({"binary_cross_entropy_with_logits", kSame,
                 [](const Tensors& t) { return torch::binary_cross_entropy_with_logits(t[0], t[1]); }});
  ops.push_back({"quantile", {{5, 3}}, [](const Tensors& t) { return t[0].quantile(0.3, 1); }});
  ops.push_back({"diagonal_scatter", {{5, 3}, {3}}, [](const Tensors& t) { return torch::diagonal_scatter(t[0], t[1]); }});
  ops.push_back({"block_diag", {{5, 3}, {3}}, [](const Tensors& t) { return torch::block_diag({t[0], t[1]}); }});
  ops.push_back({"complex", kSame, [](const Tensors& t) { return torch::real(torch::complex(t[0], t[1]).square()); }});
  return ops;
}

std::string label(const Op& op, const std::vector<Placement>& placements) {
  std::string text = op.name + " of";
  for (size_t i = 0; i < placements.size(); ++i)
    text += " " + c10::str(c10::IntArrayRef(op.shapes[i])) + " " + to_string(placements[i]);
  return text;
}

Tensor whole_of(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

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
  ASSERT_NO_THROW((full * weight).sum().backward());
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

TEST(Ops, pointwise) { check_all(pointwise_ops(), 16); }
TEST(Ops, reductions) { check_all(reduction_ops(), 10); }
TEST(Ops, matrices) { check_all(matrix_ops(), 32); }
TEST(Ops, shapes) { check_all(shape_ops(), 16); }
TEST(Ops, networks) { check_all(network_ops(), 12); }

TEST(Ops, two_mesh_dims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
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

TEST(Ops, scalars_and_comparisons) {
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

TEST(Ops, embedding) {
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

TEST(Ops, embedding_in_a_table_split_by_rows_gathers_no_table) {
  const auto mesh = line_mesh();
  const auto plain = values({7, 4}, 1);
  const auto table = make(plain, mesh, {Shard{0}});
  const auto indices = torch::arange(-3, 3).remainder(7).view({2, 3});
  const LogRedistributions log;
  const auto found = torch::embedding(table, make(indices, mesh, {Replicate{}}));
  EXPECT_TRUE(log.records().empty());
  EXPECT_EQ(DTensor(found).placements()[0], Placement(Partial{Partial::Op::kMask}));
  EXPECT_TENSORS_EQUAL(whole_of(found), torch::embedding(plain, indices));
  for (const int64_t wrong : {-1, 7}) { // on every rank, also where the neighbour of its rows is asked for
    EXPECT_THROWS_WITH(torch::embedding(table, make(torch::full({2}, wrong), mesh, {Replicate{}})), "out of range");
  }
}

TEST(Ops, a_mask_partial_stays_one_where_elements_keep_their_rank_and_is_a_sum_elsewhere) {
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

TEST(Ops, a_mask_partial_lies_beside_a_sum) {
  if (world_size() != 4) GTEST_SKIP() << "a 2x2 mesh";
  const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"a", "b"});
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

TEST(Ops, casts_that_wrap_around_keep_no_order) {
  const auto mesh = line_mesh();
  for (const auto op : {Partial::Op::kMin, Partial::Op::kMax}) {
    const auto parts = from_local(torch::tensor({-1 * mesh.local_rank(), 255 + mesh.local_rank()}), mesh, {Partial{op}});
    const auto whole = parts.full_tensor();
    for (const auto dtype : {torch::kBool, torch::kByte, torch::kChar, torch::kDouble}) {
      EXPECT_TENSORS_EQUAL(whole_of(parts.to(dtype)), whole.to(dtype));
    }
  }
}

TEST(Ops, results_lie_in_memory_as_their_arguments) {
  const auto mesh = line_mesh();
  const auto plain = values({6, 4}, 1).t();
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

TEST(Ops, pads_that_do_not_fit_are_errors) {
  const auto mesh = line_mesh();
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({5}, 1), mesh, {Shard{0}}), {1, 1, 1, 1}),
                     "4 pads for a tensor of 1 dims");
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({}, 1), mesh, {Replicate{}}), {1, 2}), "2 pads for a tensor of 0 dims");
  EXPECT_THROWS_WITH(torch::constant_pad_nd(make(values({5}, 1), mesh, {Shard{0}}), {1}), "1 pads for a tensor of 1 dims");
}

TEST(Ops, lists) {
  const auto mesh = line_mesh();
  const auto place = [&](size_t i) {
    return whole_placements({5, 3}, mesh.size())[i % whole_placements({5, 3}, mesh.size()).size()];
  };
  const auto build = [&](bool plain, int64_t seed) {
    Tensors result;
    for (size_t i = 0; i < 6; ++i) {
      const auto whole = values({5, 3}, seed + static_cast<int64_t>(i));
      result.push_back(plain ? whole.clone() : Tensor(make(whole, mesh, {place(i)})));
    }
    return result;
  };
  const auto same = [](const Tensors& a, const Tensors& b) {
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(a[i]), b[i]) << i;
  };
  auto plain = build(true, 1), sharded = build(false, 1);
  at::_foreach_mul_(plain, 3);
  at::_foreach_mul_(sharded, 3);
  same(sharded, plain);
  at::_foreach_addcdiv_(plain, build(true, 2), build(true, 3), 0.5);
  at::_foreach_addcdiv_(sharded, build(false, 2), build(false, 3), 0.5);
  same(sharded, plain);
  same(at::_foreach_sqrt(sharded), at::_foreach_sqrt(plain));
  same(at::_foreach_norm(sharded), at::_foreach_norm(plain));
  same(at::_foreach_add(sharded, build(false, 7)), at::_foreach_add(plain, build(true, 7)));
  at::_foreach_mul_(sharded, torch::tensor(0.5, torch::kDouble));
  at::_foreach_mul_(plain, 0.5);
  same(sharded, plain);
}

TEST(Ops, foreach_mul_by_partial_tensors_keeps_the_placement_that_it_writes_in) {
  const auto mesh = line_mesh();
  Tensors parameters, factors, expected;
  for (const auto op : {Partial::Op::kSum, Partial::Op::kAvg, Partial::Op::kMask, Partial::Op::kSum}) {
    const auto seed = static_cast<int64_t>(parameters.size());
    parameters.push_back(make(values({5, 3}, seed), mesh, {Replicate{}}));
    factors.push_back(make(values({5, 3}, seed + 10), mesh, {Partial{op}}));
    expected.push_back(values({5, 3}, seed) * values({5, 3}, seed + 10));
  }
  at::_foreach_mul_(parameters, factors);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(parameters[i]), expected[i]);
}

/// The lists of a fused step over a tensor for each placement, more than are fetched ahead.
struct FusedStep {
  Tensors parameters, gradients, averages, squares, max_squares, steps;
};

FusedStep fused_step(const DeviceMesh& mesh, bool plain, bool plain_steps) {
  FusedStep step;
  for (int64_t round = 0; round < 5; ++round) {
    for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
      int64_t seed = 10 * round;
      for (auto* list : {&step.parameters, &step.gradients, &step.averages, &step.squares, &step.max_squares}) {
        const auto whole = values({5, 3}, ++seed).abs();
        list->push_back(plain ? whole : Tensor(make(whole, mesh, {placement})));
      }
      const auto steps = torch::tensor(3.0);
      step.steps.push_back(plain || plain_steps ? steps : Tensor(make(steps, mesh, {Replicate{}})));
    }
  }
  return step;
}

using FusedAdam = decltype(at::_ops::_fused_adam_::call);

void expect_fused_equal_to_plain(FusedAdam& run, const DeviceMesh& mesh, bool plain_steps, const std::optional<Tensor>& scale) {
  const auto step = [&](bool plain) {
    auto lists = fused_step(mesh, plain, plain_steps);
    run(lists.parameters, lists.gradients, lists.averages, lists.squares, lists.max_squares, lists.steps, 0.1, 0.9, 0.99, 0.1,
        1e-8,
        /*amsgrad=*/true, /*maximize=*/false, scale, std::nullopt);
    Tensors written;
    for (const auto& list : {lists.parameters, lists.averages, lists.squares, lists.max_squares})
      written.insert(written.end(), list.begin(), list.end());
    return written;
  };
  const auto expected = step(true), actual = step(false);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(actual[i]), expected[i]) << "tensor " << i;
}

TEST(Ops, fused_adam_and_adamw) {
  const auto mesh = line_mesh();
  for (const bool plain_steps : {true, false}) {
    for (const auto& scale : {std::optional<Tensor>(), std::optional(torch::tensor(2.0F))}) {
      for (const bool grad_mode : {true, false}) {
        at::AutoGradMode mode(grad_mode);
        expect_fused_equal_to_plain(at::_ops::_fused_adam_::call, mesh, plain_steps, scale);
        expect_fused_equal_to_plain(at::_ops::_fused_adamw_::call, mesh, plain_steps, scale);
      }
    }
  }
}

} // namespace
} // namespace tessera::testing
