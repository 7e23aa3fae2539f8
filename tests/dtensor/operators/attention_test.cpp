// The fused attention kernels. Those of CUDA get CPU kernels here that keep their contract: the same results, layouts and outputs
// beside them, so that their rules are tested where there is no GPU.
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <torch/library.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::attention_test {
namespace {

using at::Tensor;
using std::optional;

/// softmax(query keyᵀ scale + bias, causal): [b, h, l, s], with the logarithm of its divisors.
std::pair<Tensor, Tensor> weights(const Tensor& query, const Tensor& key, const optional<Tensor>& bias, bool causal,
                                  optional<double> scale) {
  auto scores = query.matmul(key.transpose(-2, -1)).mul(scale.value_or(1 / std::sqrt(query.size(-1))));
  if (bias && bias->defined()) scores = scores.add(*bias);
  if (causal) scores = scores.masked_fill(torch::ones_like(scores).tril().eq(0), -INFINITY);
  return {scores.softmax(-1), scores.logsumexp(-1)};
}

Tensor like_query(const Tensor& result, const Tensor& query) { return torch::empty_like(query).copy_(result); }
Tensor heads_inside(const Tensor& result) { return result.transpose(1, 2).contiguous().transpose(1, 2); }
Tensor dropped(const Tensor& weights, double p) { return p > 0 ? torch::dropout(weights, p, true) : weights; }

/// Gradients of query, key, value and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const Tensor& bias, const Tensor& logsumexp,
                                                     bool causal, optional<double> scale) {
  const auto [p, divisors] = weights(query, key, bias, causal, scale);
  EXPECT_TENSORS_CLOSE(logsumexp, divisors); // they arrive as they were
  const auto dp = gradient.matmul(value.transpose(-2, -1));
  const auto ds = p.mul(dp.sub(dp.mul(p).sum(-1, true)));
  const auto factor = scale.value_or(1 / std::sqrt(query.size(-1)));
  return {ds.matmul(key).mul(factor), ds.transpose(-2, -1).matmul(query).mul(factor), p.transpose(-2, -1).matmul(gradient),
          bias.defined() ? ds : Tensor()};
}

Tensor state() { return torch::full({2}, 7, torch::kLong); } // of the generator: each rank's own

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double p, bool causal, bool /*debug*/, optional<double> scale) {
  const auto [w, divisors] = weights(query, key, {}, causal, scale);
  return {like_query(dropped(w, p).matmul(value), query),
          divisors,
          {},
          {},
          query.size(2),
          key.size(2),
          state(),
          torch::empty({}),
          torch::empty({0})};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& /*out*/, const Tensor& logsumexp,
                                                  const Tensor& /*cum_q*/, const Tensor& /*cum_k*/, int64_t max_q, int64_t max_k,
                                                  double /*p*/, bool causal, const Tensor& seed, const Tensor& /*offset*/,
                                                  optional<double> scale) {
  EXPECT_EQ(max_q, query.size(2));
  EXPECT_EQ(max_k, key.size(2));
  EXPECT_TENSORS_EQUAL(seed, state());
  const auto [q, k, v, none] = gradients(gradient, query, key, value, {}, logsumexp, causal, scale);
  return {q, k, v};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const optional<Tensor>& bias, bool log_sum_exp, double p, bool causal,
                                                     optional<double> scale) {
  const auto [w, divisors] = weights(query, key, bias, causal, scale);
  const auto rows = query.size(2);
  const auto padded = torch::constant_pad_nd(divisors, {0, (32 - rows % 32) % 32});
  return {heads_inside(dropped(w, p).matmul(value)), log_sum_exp ? padded : padded.narrow(2, 0, 0), torch::full({}, 7),
          torch::empty({})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                              const Tensor& value, const Tensor& bias, const Tensor& /*out*/,
                                                              const Tensor& logsumexp, const Tensor& /*seed*/,
                                                              const Tensor& /*offset*/, double /*p*/,
                                                              std::array<bool, 4> /*wanted*/, bool causal,
                                                              optional<double> scale) {
  return gradients(gradient, query, key, value, bias, logsumexp.narrow(2, 0, query.size(2)), causal, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& bias, bool /*log_sum_exp*/, double p,
    bool causal, bool /*debug*/, optional<double> scale) {
  const auto [w, divisors] = weights(query, key, bias, causal, scale);
  return {like_query(dropped(w, p).matmul(value), query),
          divisors.unsqueeze(-1),
          {},
          {},
          query.size(2),
          key.size(2),
          torch::full({}, 7),
          torch::empty({}),
          {}};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& /*out*/, const Tensor& logsumexp,
                                                  const Tensor& /*seed*/, const Tensor& /*offset*/, const Tensor& bias,
                                                  const Tensor& /*cum_q*/, const Tensor& /*cum_k*/, int64_t /*max_q*/,
                                                  int64_t /*max_k*/, double /*p*/, bool causal, optional<double> scale) {
  const auto [q, k, v, none] = gradients(gradient, query, key, value, bias, logsumexp.squeeze(-1), causal, scale);
  return {q, k, v};
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  library.impl("_scaled_dot_product_cudnn_attention", &cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward);
}

struct Call {
  const char* name;
  bool masked, causal;
  double p = 0;
};

/// The kernel `name` on query, key, value and perhaps a mask of all batches and heads.
Tensor attend(const Call& call, const std::vector<Tensor>& t) {
  const auto mask = t.size() > 3 ? optional(t[3]) : std::nullopt;
  const std::string name = call.name;
  if (name == "flash") return std::get<0>(at::_scaled_dot_product_flash_attention(t[0], t[1], t[2], call.p, call.causal));
  if (name == "efficient") {
    return std::get<0>(at::_scaled_dot_product_efficient_attention(t[0], t[1], t[2], mask, true, call.p, call.causal));
  }
  const auto fixed = mask ? optional(mask->detach()) : mask;
  if (name == "cudnn") {
    return std::get<0>(at::_scaled_dot_product_cudnn_attention(t[0], t[1], t[2], fixed, true, call.p, call.causal));
  }
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(t[0], t[1], t[2], call.p, call.causal, fixed));
}

/// batch 2, 5 rows of queries, 3 of keys, 4 heads: as a projection leaves them, before the heads come inside.
std::vector<Tensor> projections() {
  std::vector<Tensor> result;
  for (const int64_t rows : {5, 3, 3}) result.push_back(torch::randn({2, rows, 4, 8}, torch::kDouble));
  return result;
}

const Call kCalls[] = {{"flash", false, false}, {"flash", false, true}, {"efficient", false, true}, {"efficient", true, false},
                       {"cudnn", false, true},  {"cudnn", true, false}, {"cpu", false, true},       {"cpu", true, false}};

/// Forward and backward on these placements of the projections, and of the mask, against plain tensors.
void check(const Call& call, const DeviceMesh& mesh, const std::vector<Placements>& placements, const Placements& of_mask) {
  SCOPED_TRACE(::testing::Message() << call.name << (call.masked ? " masked " : " ") << ::testing::PrintToString(placements));
  torch::manual_seed(1);
  auto leaves = projections();
  if (call.masked) leaves.push_back(torch::randn({2, 4, 5, 3}, torch::kDouble));
  std::vector<Tensor> sharded_leaves;
  for (size_t i = 0; i < leaves.size(); ++i) {
    sharded_leaves.push_back(make(leaves[i], mesh, i < 3 ? placements[i] : of_mask).set_requires_grad(true));
    leaves[i].set_requires_grad(true);
  }
  const auto run = [&call](const std::vector<Tensor>& from) {
    std::vector<Tensor> arguments;
    for (size_t i = 0; i < from.size(); ++i) arguments.push_back(i < 3 ? from[i].transpose(1, 2) : from[i]);
    return attend(call, arguments);
  };
  const auto expected = run(leaves), actual = run(sharded_leaves);
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.strides(), expected.strides());
  EXPECT_TENSORS_CLOSE(whole_of(actual), expected);
  const auto weight = torch::randn(expected.sizes(), torch::kDouble);
  (expected * weight).sum().backward();
  (whole_of(actual) * weight).sum().backward();
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_EQ(sharded_leaves[i].grad().defined(), leaves[i].grad().defined()) << i;
    if (!leaves[i].grad().defined()) continue;
    EXPECT_TENSORS_CLOSE(whole_of(sharded_leaves[i].grad()), leaves[i].grad()) << i;
  }
}

TEST(Attention, EqualsThePlainKernelOnAllPlacements) {
  const auto mesh = line_mesh();
  const std::vector<Placement> choices{Replicate{}, Shard{0}, Shard{1}, Shard{2}, Shard{3}, Partial{}};
  std::vector<std::vector<Placements>> products;
  for (const auto& query : choices) {
    for (const auto& key : choices) {
      for (const auto& value : choices) products.push_back({{query}, {key}, {value}});
    }
  }
  for (const auto& call : kCalls) {
    for (const auto& placements : sweep(products, 12)) {
      for (const Placement& of_mask : {Placement(Replicate{}), Placement(Shard{1}), Placement(Shard{2})}) {
        check(call, mesh, placements, {of_mask});
        if (!call.masked) break;
      }
    }
  }
}

TEST(Attention, OverBatchAndHeadsMovesNothing) {
  const auto mesh = line_mesh();
  if (mesh.size() == 3) GTEST_SKIP() << "2 and 4 do not split over 3 ranks";
  const StrictSharding strict;
  for (const auto& call : kCalls) {
    for (const int64_t dim : {int64_t{0}, int64_t{1}}) {
      if (dim == 0 && mesh.size() > 2) continue; // a rank without a batch
      SCOPED_TRACE(::testing::Message() << call.name << " Shard(" << dim << ")");
      auto tensors = projections();
      for (auto& tensor : tensors) tensor = make(tensor.transpose(1, 2).contiguous(), mesh, {Shard{dim}}).requires_grad_();
      if (call.masked) tensors.push_back(make(torch::randn({2, 4, 5, 3}, torch::kDouble), mesh, {Shard{dim}}).requires_grad_());
      const LogRedistributions log;
      const auto result = attend(call, tensors);
      EXPECT_EQ(DTensor(result).placements()[0], Placement(Shard{dim}));
      result.backward(torch::ones_like(result));
      EXPECT_EQ(log.to_string(), "");
    }
  }
}

/// As programs write it, by products of all heads at once.
TEST(Attention, ByProductsOfSplitHeadsMovesNothing) {
  const auto n = world_size();
  const auto attend = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return (q.matmul(k.transpose(-2, -1)) / 2).softmax(-1).matmul(v);
  };
  std::vector<std::pair<DeviceMesh, Placements>> layouts{{line_mesh(), {Shard{1}}}, {line_mesh(), {Shard{0}}}};
  if (n == 4) {
    const auto grid = init_device_mesh(test_device_type(), {2, 2});
    layouts.insert(layouts.end(), {{grid, {Shard{0}, Shard{1}}}, {grid, {Shard{1}, Shard{0}}}, {grid, {Shard{1}, Shard{1}}}});
  }
  torch::manual_seed(1);
  for (const int64_t heads : {2 * n, int64_t{5}}) {
    std::vector<Tensor> plain;
    for (int i = 0; i < 3; ++i) plain.push_back(torch::randn({4, heads, 3, 2}, torch::kDouble).requires_grad_());
    attend(plain[0], plain[1], plain[2]).square().sum().backward();
    for (const auto& [mesh, placements] : layouts) {
      if (heads == 5 && mesh.ndim() == 2) continue;
      SCOPED_TRACE(::testing::Message() << heads << " heads, " << placements);
      std::vector<Tensor> split;
      for (const auto& tensor : plain) split.push_back(Tensor(make(tensor.detach(), mesh, placements)).requires_grad_());
      const CountCollectives counted;
      const auto result = attend(split[0], split[1], split[2]);
      result.square().backward(torch::ones_like(result.detach()));
      EXPECT_EQ(counted.total_bytes(), 0) << counted.to_string();
      for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(DTensor(split[i].grad()).full_tensor(), plain[i].grad());
    }
  }
}

/// Each rank draws the whole mask, as one device does.
TEST(Attention, DropsWhatOneDeviceWould) {
  torch::manual_seed(1);
  const auto mesh = line_mesh();
  torch::NoGradGuard no_grad;
  for (const auto* name : {"flash", "efficient", "cudnn"}) {
    SCOPED_TRACE(name);
    auto plain = projections(), sharded = plain;
    for (size_t i = 0; i < plain.size(); ++i) sharded[i] = make(plain[i], mesh, {Shard{2}}).transpose(1, 2);
    for (auto& tensor : plain) tensor = tensor.transpose(1, 2);
    const Call call{name, false, false, 0.5};
    torch::manual_seed(3);
    const auto expected = attend(call, plain);
    torch::manual_seed(3);
    EXPECT_TENSORS_CLOSE(whole_of(attend(call, sharded)), expected);
    EXPECT_FALSE(expected.equal(attend({name, false, false, 0}, plain)));
  }
}

} // namespace
} // namespace tessera::testing::attention_test
