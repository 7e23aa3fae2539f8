#include "op_cases.h"

namespace tessera::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using SizeList = std::vector<std::vector<int64_t>>;

Tensor values(const std::vector<int64_t>& sizes, int64_t seed) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(numel, torch::kDouble).mul(7).add(3 * seed).remainder(11).add(1).div(4).view(sizes);
}
namespace {
const SizeList kSame{{5, 3}, {5, 3}}, kRow{{5, 3}, {3}}, kColumn{{5, 3}, {5, 1}}, kMatrix{{5, 3}}, kCube{{2, 3, 4}};
} // namespace

std::vector<Op> pointwise_ops() {
  std::vector<Op> ops;
  const auto add = [&](std::string name, SizeList shapes, std::function<Tensor(const Tensors&)> run, bool differentiable = true) {
    ops.push_back({std::move(name), std::move(shapes), std::move(run), differentiable});
  };
  for (const auto& shapes : {kSame, kRow, kColumn, SizeList{{5, 3}, {}}, SizeList{{2, 3, 2}, {3, 2}}}) {
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
  add("where number", kMatrix, [](const Tensors& t) { return torch::where(t[0] > 1.2, t[0], 0.5); });
  add(
      "where numbers", kMatrix, [](const Tensors& t) { return torch::where(t[0] > 1.2, 2, 0.5); }, false);
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
    for (const auto& shapes : {kMatrix, kCube, SizeList{{7}}}) {
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
  const auto add = [&](std::string name, SizeList shapes, std::function<Tensor(const Tensors&)> run) {
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

std::vector<Op> network_ops() {
  std::vector<Op> ops;
  for (const int64_t key_heads : {4, 2, 1}) {
    const SizeList shapes{{2, 4, 3, 2}, {2, key_heads, 5, 2}, {2, key_heads, 5, 2}};
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

} // namespace tessera::testing
