// Each operator on the meta device against the CPU's kernel: results, what autograd keeps, and gradients, by shape, dtype and
// strides.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/activations/saved_tensors.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/parallel/moe.h>
#include <tessera/plan/meta_operators.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::meta_operators_test {

namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// An operator of differentiable inputs of these shapes.
struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> inputs;
  std::function<Tensors(const Tensors&)> run;
  bool in_bfloat16 = true;
};

std::string text_of(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::vector<int64_t> strides; // that of a dim of one place says nothing
  for (int64_t d = 0; d < tensor.dim(); ++d) strides.push_back(tensor.size(d) == 1 ? 0 : tensor.stride(d));
  return c10::str(tensor.scalar_type(), tensor.sizes(), tensor.numel() == 0 ? std::vector<int64_t>() : strides);
}

struct Seen {
  std::vector<std::string> results, kept, gradients;
};

/// What the case gives on a device.
Seen run(const Case& each, torch::Device device, torch::ScalarType dtype) {
  Tensors inputs;
  for (const auto& sizes : each.inputs)
    inputs.push_back(torch::full(sizes, 0.5, torch::dtype(dtype).device(device)).set_requires_grad(true));
  Seen seen;
  Tensor sum;
  {
    const auto scope = saved_tensors_in([&](const Tensor& tensor) -> std::function<Tensor()> {
      seen.kept.push_back(text_of(tensor));
      return [tensor] { return tensor; };
    });
    for (const auto& result : each.run(inputs)) {
      seen.results.push_back(text_of(result));
      if (!result.requires_grad()) continue;
      const auto each_sum = result.sum();
      sum = sum.defined() ? sum + each_sum : each_sum;
    }
  }
  if (sum.defined()) sum.backward();
  for (const auto& input : inputs) seen.gradients.push_back(text_of(input.grad()));
  return seen;
}

void expect_alike(const Case& each, torch::ScalarType dtype) {
  SCOPED_TRACE(c10::str(each.name, " in ", dtype));
  const auto cpu = run(each, torch::kCPU, dtype), meta = run(each, torch::kMeta, dtype);
  EXPECT_EQ(cpu.results, meta.results);
  EXPECT_EQ(cpu.kept, meta.kept);
  EXPECT_EQ(cpu.gradients, meta.gradients);
}

void expect_all_alike(const std::vector<Case>& cases) {
  register_meta_operators();
  for (const auto& each : cases) {
    expect_alike(each, torch::kFloat);
    if (each.in_bfloat16) expect_alike(each, torch::kBFloat16);
  }
}

Tensor indices(const Tensor& like, const std::vector<int64_t>& sizes) {
  return torch::zeros(sizes, like.options().dtype(torch::kLong).requires_grad(false));
}

std::function<Tensors(const Tensors&)> one(const std::function<Tensor(const Tensor&)>& function) {
  return [function](const Tensors& inputs) { return Tensors{function(inputs[0])}; };
}

std::vector<Case> embeddings() {
  const auto at = [](const std::vector<int64_t>& sizes) {
    return [sizes](const Tensors& in) { return Tensors{torch::embedding(in[0], indices(in[0], sizes))}; };
  };
  return {{"embedding", {{7, 5}}, at({2, 3})},
          {"embedding of one", {{1, 1}}, at({1})},
          {"embedding of none", {{7, 5}}, at({0, 3})},
          {"embedding without dims", {{7, 5}}, at({})},
          {"index_select of columns", {{4, 6}}, [](const Tensors& in) {
             return Tensors{torch::index_select(in[0].t(), 1, indices(in[0], {3}))};
           }}};
}

Tensors normed(const Tensors& in, const std::vector<int64_t>& sizes) {
  return {torch::layer_norm(in[0], sizes, in.size() > 1 ? in[1] : Tensor(), in.size() > 2 ? in[2] : Tensor(), 1e-5)};
}

std::vector<Case> layer_norms() {
  const auto last = [](const Tensors& in) { return normed(in, {in[0].size(-1)}); };
  return {{"layer_norm", {{2, 3, 5}, {5}, {5}}, last},
          {"layer_norm of one", {{1, 1}, {1}, {1}}, last},
          {"layer_norm of none", {{0, 5}, {5}, {5}}, last},
          {"layer_norm without bias", {{3, 5}, {5}}, last},
          {"layer_norm without parameters", {{3, 5}}, last},
          {"layer_norm of two dims",
           {{2, 3, 5}, {3, 5}, {3, 5}},
           [](const Tensors& in) {
             return normed(in, {3, 5});
           }},
          {"layer_norm of a transpose",
           {{5, 3}, {5}, {5}},
           [](const Tensors& in) {
             return normed({in[0].t(), in[1], in[2]}, {5});
           }},
          {"rms_norm", {{2, 3, 5}, {5}}, [](const Tensors& in) { return Tensors{torch::rms_norm(in[0], {5}, in[1], 1e-5)}; }}};
}

std::vector<Case> other_norms() {
  const auto batch = [](bool training) {
    return [training](const Tensors& in) {
      const auto running = torch::ones({in[1].size(0)}, in[0].options().requires_grad(false));
      return Tensors{torch::batch_norm(in[0], in[1], in[2], running, running.clone(), training, 0.1, 1e-5, false)};
    };
  };
  const auto last = [batch](const Tensors& in) {
    return batch(true)({in[0].contiguous(torch::MemoryFormat::ChannelsLast), in[1], in[2]});
  };
  return {
      {"batch_norm", {{4, 3, 5, 5}, {3}, {3}}, batch(true)},
      {"batch_norm of rows", {{4, 3}, {3}, {3}}, batch(true)},
      {"batch_norm in evaluation", {{4, 3, 5}, {3}, {3}}, batch(false)},
      {"batch_norm with channels last", {{4, 3, 5, 5}, {3}, {3}}, last},
      {"group_norm", {{2, 6, 5}, {6}, {6}}, [](const Tensors& in) { return Tensors{torch::group_norm(in[0], 3, in[1], in[2])}; }},
      {"group_norm of pictures", {{2, 6, 3, 5}, {6}, {6}}, [](const Tensors& in) {
         return Tensors{torch::group_norm(in[0], 2, in[1], in[2])};
       }}};
}

Tensors attend(const Tensors& in, const std::optional<Tensor>& mask = std::nullopt, bool causal = false, double dropout = 0) {
  return {torch::scaled_dot_product_attention(in[0], in[1], in[2], mask, dropout, causal)};
}

std::vector<Case> attentions() {
  const std::vector<std::vector<int64_t>> shapes{{2, 3, 7, 4}, {2, 3, 5, 4}, {2, 3, 5, 4}};
  const auto masked = [](torch::ScalarType dtype) {
    return [dtype](const Tensors& in) {
      return attend(in, torch::ones({in[0].size(-2), in[1].size(-2)}, in[0].options().dtype(dtype).requires_grad(false)));
    };
  };
  const auto heads = [](const Tensors& in) {
    const auto split = [](const Tensor& x) { return x.unflatten(-1, {3, -1}).transpose(1, 2); };
    return Tensors{attend({split(in[0]), split(in[1]), split(in[2])})[0].transpose(1, 2).flatten(2)};
  };
  const auto grouped = [](const Tensors& in) {
    return Tensors{torch::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0, true, std::nullopt, /*enable_gqa=*/true)};
  };
  return {
      {"attention", shapes, [](const Tensors& in) { return attend(in); }},
      {"causal attention", {{1, 2, 9, 8}, {1, 2, 9, 8}, {1, 2, 9, 8}}, [](const Tensors& in) { return attend(in, {}, true); }},
      {"attention of one", {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}}, [](const Tensors& in) { return attend(in); }},
      {"attention of none", {{2, 3, 0, 4}, {2, 3, 0, 4}, {2, 3, 0, 4}}, [](const Tensors& in) { return attend(in); }},
      {"attention with a bool mask", shapes, masked(torch::kBool)},
      {"attention with dropout", shapes, [](const Tensors& in) { return attend(in, {}, false, 0.1); }},
      {"attention of three dims", {{3, 7, 4}, {3, 5, 4}, {3, 5, 4}}, [](const Tensors& in) { return attend(in); }},
      {"attention of heads", {{2, 5, 12}, {2, 5, 12}, {2, 5, 12}}, heads},
      {"attention of grouped heads", {{2, 4, 5, 8}, {2, 2, 5, 8}, {2, 2, 5, 8}}, grouped}};
}

std::vector<Case> activations() {
  namespace F = torch;
  return {{"relu", {{3, 5}}, one([](const Tensor& x) { return F::relu(x); })},
          {"relu of a transpose", {{3, 5}}, one([](const Tensor& x) { return F::relu(x.t()); })},
          {"relu of none", {{0}}, one([](const Tensor& x) { return F::relu(x); })},
          {"relu in place", {{3}}, one([](const Tensor& x) { return (x * 2).relu_(); })},
          {"gelu", {{3, 5}}, one([](const Tensor& x) { return F::gelu(x); })},
          {"gelu with tanh", {{3, 5}}, one([](const Tensor& x) { return F::gelu(x, "tanh"); })},
          {"silu", {{3, 5}}, one([](const Tensor& x) { return F::silu(x); })},
          {"mish", {{3, 5}}, one([](const Tensor& x) { return F::mish(x); })},
          {"softplus", {{3, 5}}, one([](const Tensor& x) { return F::softplus(x); })},
          {"glu", {{3, 6}}, one([](const Tensor& x) { return F::glu(x, 1); })},
          {"hardswish", {{3, 5}}, one([](const Tensor& x) { return F::hardswish(x); })},
          {"relu6", {{3, 5}}, one([](const Tensor& x) { return F::relu6(x); })},
          {"log_sigmoid", {{3, 5}}, one([](const Tensor& x) { return F::log_sigmoid(x); })},
          {"dropout", {{3, 5}}, one([](const Tensor& x) { return F::dropout(x, 0.5, true); })},
          {"prelu", {{3, 5}, {1}}, [](const Tensors& in) { return Tensors{F::prelu(in[0], in[1])}; }}};
}

std::vector<Case> convolutions() {
  const auto conv2d = [](const Tensors& in) { return Tensors{torch::conv2d(in[0], in[1], in[2], 2, 1)}; };
  const auto last = [conv2d](const Tensors& in) {
    return conv2d({in[0].contiguous(torch::MemoryFormat::ChannelsLast), in[1], in[2]});
  };
  const auto transposed = [](const Tensors& in) { return Tensors{torch::conv_transpose2d(in[0], in[1], in[2], 2, 1, 1)}; };
  return {{"conv2d", {{2, 3, 9, 7}, {4, 3, 3, 3}, {4}}, conv2d},
          {"conv2d with channels last", {{2, 3, 9, 7}, {4, 3, 3, 3}, {4}}, last},
          {"conv2d of patches",
           {{2, 3, 8, 8}, {5, 3, 4, 4}, {5}},
           [](const Tensors& in) { return Tensors{torch::conv2d(in[0], in[1], in[2], 4).flatten(2).transpose(1, 2)}; }},
          {"conv2d of groups",
           {{2, 4, 5, 5}, {8, 2, 3, 3}},
           [](const Tensors& in) {
             return Tensors{torch::convolution(in[0], in[1], {}, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 2)};
           }},
          {"conv1d", {{2, 3, 9}, {4, 3, 3}, {4}}, [](const Tensors& in) { return Tensors{torch::conv1d(in[0], in[1], in[2])}; }},
          {"conv2d of one picture", {{3, 9, 7}, {4, 3, 3, 3}, {4}}, conv2d},
          {"conv_transpose2d", {{2, 3, 5, 4}, {3, 6, 3, 3}, {6}}, transposed}};
}

std::vector<Case> pools() {
  return {{"max_pool2d", {{2, 3, 9, 7}}, one([](const Tensor& x) { return torch::max_pool2d(x, 3, 2, 1); })},
          {"avg_pool2d", {{2, 3, 9, 7}}, one([](const Tensor& x) { return torch::avg_pool2d(x, 3, 2); })},
          {"adaptive_avg_pool2d", {{2, 3, 9, 7}}, one([](const Tensor& x) {
             return torch::adaptive_avg_pool2d(x, {4, 3});
           })},
          {"adaptive_avg_pool2d to one", {{2, 3, 9, 7}}, one([](const Tensor& x) {
             return torch::adaptive_avg_pool2d(x, {1, 1});
           })},
          {"max_pool3d", {{2, 3, 5, 6, 7}}, one([](const Tensor& x) { return torch::max_pool3d(x, 3, 2, 1, 1, true); })}};
}

std::vector<Case> losses() {
  const auto of_two = [](const std::function<Tensor(const Tensor&, const Tensor&)>& loss) {
    return [loss](const Tensors& in) { return Tensors{loss(in[0], in[1].detach())}; };
  };
  const auto entropy = [](const Tensors& in) {
    return Tensors{torch::cross_entropy_loss(in[0], indices(in[0], {in[0].size(0)}))};
  };
  const auto pictures = [](const Tensors& in) { return Tensors{torch::cross_entropy_loss(in[0], indices(in[0], {2, 3, 4}))}; };
  return {
      {"mse_loss", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) { return torch::mse_loss(x, y); })},
      {"mse_loss of each", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) { return torch::mse_loss(x, y, 0); })},
      {"l1_loss", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) { return torch::l1_loss(x, y); })},
      {"huber_loss", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) { return torch::huber_loss(x, y); })},
      {"smooth_l1_loss", {{3}, {3}}, of_two([](const Tensor& x, const Tensor& y) { return torch::smooth_l1_loss(x, y); })},
      {"binary_cross_entropy", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) {
         return torch::binary_cross_entropy(x, y);
       })},
      {"binary_cross_entropy_with_logits", {{3, 5}, {3, 5}}, of_two([](const Tensor& x, const Tensor& y) {
         return torch::binary_cross_entropy_with_logits(x, y);
       })},
      {"cross_entropy_loss", {{3, 5}}, entropy},
      {"cross_entropy_loss of pictures", {{2, 5, 3, 4}}, pictures}};
}

std::vector<Case> others() {
  return {
      {"where", {{3, 1}, {5}}, [](const Tensors& in) { return Tensors{torch::where(in[0] > 0, in[0], in[1])}; }},
      {"masked_fill", {{3, 5}}, one([](const Tensor& x) { return x.masked_fill(x > 0, 1); })},
      {"flip", {{3, 5}}, one([](const Tensor& x) { return x.flip({1}); })},
      {"roll", {{3, 5}}, one([](const Tensor& x) { return x.roll(1, 0); })},
      {"var", {{3, 5}}, one([](const Tensor& x) { return x.var(1); })},
      {"std of all", {{3, 5}}, one([](const Tensor& x) { return x.std(); })},
      {"var_mean",
       {{3, 5}},
       [](const Tensors& in) {
         auto [variance, mean] = torch::var_mean(in[0], {1}, true, true);
         return Tensors{variance, mean};
       }},
      {"max", {{3, 5}}, one([](const Tensor& x) { return x.max(); })},
      {"prod", {{3, 5}}, one([](const Tensor& x) { return x.prod(); })},
      {"norm", {{3, 5}}, one([](const Tensor& x) { return x.norm(); })},
      {"topk", {{3, 5}}, one([](const Tensor& x) { return std::get<0>(x.topk(2)); })},
      {"gather", {{3, 5}}, one([](const Tensor& x) {
         return x.gather(1, indices(x, {3, 2}));
       })},
      {"index", {{3, 5}}, one([](const Tensor& x) { return x.index({indices(x, {4})}); })},
      {"index_add", {{3, 5}, {4, 5}}, [](const Tensors& in) { return Tensors{in[0].index_add(0, indices(in[0], {4}), in[1])}; }},
      {"cumsum", {{3, 5}}, one([](const Tensor& x) { return x.cumsum(1); })},
      {"bincount", {{3}}, one([](const Tensor& x) { return torch::bincount(indices(x, {4}), {}, 6); })},
      {"bucketize", {{3, 5}}, one([](const Tensor& x) { return torch::bucketize(x.detach(), torch::arange(4, x.options())); })},
      {"grouped_mm",
       {{6, 16}, {2, 8, 16}},
       [](const Tensors& in) {
         const auto ends = torch::arange(1, 3, torch::dtype(torch::kInt).device(in[0].device())) * 3;
         const auto product = torch::_grouped_mm(in[0], in[1].transpose(1, 2), ends);
         return Tensors{product * product};
       }},
      {"rotary", {{2, 3, 5, 8}}, one([](const Tensor& x) {
         const auto halves = x.chunk(2, -1);
         const auto angles = torch::outer(torch::arange(5, x.options().requires_grad(false)), torch::ones({4}, x.options()));
         const auto both = torch::cat({angles, angles}, -1);
         return x * both.cos() + torch::cat({-halves[1], halves[0]}, -1) * both.sin();
       })}};
}

} // namespace

TEST(MetaOperators, EmbeddingsAreAsTheCpus) { expect_all_alike(embeddings()); }
TEST(MetaOperators, LayerNormsAreAsTheCpus) { expect_all_alike(layer_norms()); }
TEST(MetaOperators, OtherNormsAreAsTheCpus) { expect_all_alike(other_norms()); }
TEST(MetaOperators, AttentionIsAsTheCpus) { expect_all_alike(attentions()); }
TEST(MetaOperators, ActivationsAreAsTheCpus) { expect_all_alike(activations()); }
TEST(MetaOperators, ConvolutionsAreAsTheCpus) { expect_all_alike(convolutions()); }
TEST(MetaOperators, PoolsAreAsTheCpus) { expect_all_alike(pools()); }
TEST(MetaOperators, LossesAreAsTheCpus) { expect_all_alike(losses()); }
TEST(MetaOperators, OthersAreAsTheCpus) { expect_all_alike(others()); }

TEST(MetaOperators, NormsOfMixedDtypesAreAsTheCpus) {
  register_meta_operators();
  const auto parts = [](const Tensors& in) {
    return normed({in[0].to(torch::kBFloat16), in[1], in[2]}, {5}); // as autocast gives it
  };
  expect_alike({"layer_norm of bf16 with fp32", {{2, 5}, {5}, {5}}, parts}, torch::kFloat);
}

TEST(MetaOperators, CudaKeepsStatisticsInFp32AndNoWeightsOfAttention) {
  register_meta_operators();
  const Case norm{"layer_norm", {{2, 3, 5}, {5}, {5}}, [](const Tensors& in) { return normed(in, {5}); }};
  const Case attention{
      "attention", {{1, 2, 9, 4}, {1, 2, 9, 4}, {1, 2, 9, 4}}, [](const Tensors& in) { return attend(in, {}, false, 0.1); }};
  const std::string weights = "[1, 2, 9, 9]";
  const auto keeps_weights = [&](const Seen& seen) {
    return std::any_of(seen.kept.begin(), seen.kept.end(),
                       [&](const auto& kept) { return kept.find(weights) != std::string::npos; });
  };
  EXPECT_TRUE(keeps_weights(run(attention, torch::kMeta, torch::kBFloat16)));
  const MetaOperatorsOf cuda(torch::kCUDA);
  const std::string statistics = "Float[2, 3, 1]3 1 0";
  const auto kept = run(norm, torch::kMeta, torch::kBFloat16).kept;
  EXPECT_EQ(std::count(kept.begin(), kept.end(), statistics), 2);
  EXPECT_FALSE(keeps_weights(run(attention, torch::kMeta, torch::kBFloat16)));
  const Case rms{
      "rms_norm", {{2, 3, 5}, {5}}, [](const Tensors& in) { return Tensors{torch::rms_norm(in[0], {5}, in[1], 1e-5)}; }};
  const auto of_rms = run(rms, torch::kMeta, torch::kBFloat16);
  EXPECT_EQ(of_rms.kept, (std::vector<std::string>{"BFloat16[2, 3, 5]15 5 1", "BFloat16[5]1", statistics}));
  EXPECT_EQ(of_rms.results, run(rms, torch::kCPU, torch::kBFloat16).results);
  EXPECT_EQ(of_rms.gradients, run(rms, torch::kCPU, torch::kBFloat16).gradients);
  const Case drop{"dropout", {{3, 5}}, one([](const Tensor& x) { return torch::dropout(x, 0.5, true); })};
  EXPECT_EQ(run(drop, torch::kMeta, torch::kBFloat16).kept, std::vector<std::string>{"Bool[3, 5]5 1"});
}

TEST(MetaOperators, SpreadTheTokensOfAMixtureEvenly) {
  register_meta_operators();
  auto layer = on_meta([] { return MoE(MoEOptions{.width = 8, .hidden = 16, .experts = 4, .route = {.top_k = 2}}); });
  const auto x = torch::empty({3, 5, 8}, torch::kMeta).set_requires_grad(true);
  const auto y = layer->forward(x);
  EXPECT_EQ(y.sizes(), x.sizes());
  y.sum().backward();
  for (const auto& parameter : layer->parameters()) EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
}

TEST(MetaOperators, AreRegisteredOnceAndKeepKernelsThatAreThere) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(register_meta_operators);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(torch::relu(torch::empty({3}, torch::kMeta)).sizes(), torch::IntArrayRef({3}));
  EXPECT_THROWS_WITH(MetaOperatorsOf{c10::DeviceType::XPU}, "stand for those of the CPU or of CUDA, not of XPU");
}

TEST(MetaOperators, RefuseShapesThatDoNotFit) {
  register_meta_operators();
  const auto meta = [](const std::vector<int64_t>& sizes) { return torch::empty(sizes, torch::kMeta); };
  EXPECT_THROWS_WITH(torch::conv2d(meta({1, 3, 5, 5}), meta({4, 2, 3, 3})), "the input has 3 channels, but the weight");
  EXPECT_THROWS_WITH(torch::conv2d(meta({1, 3, 2, 2}), meta({4, 3, 3, 3})), "is smaller than what a weight of the shape");
  EXPECT_THROWS_WITH(torch::layer_norm(meta({2, 5}), {4}), "whose end is not the normalized shape");
}

} // namespace tessera::testing::meta_operators_test
