// Models of other shapes than the GPT's, unmodified, beside one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

#include <functional>
#include <string>

namespace tessera::testing::models_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

/// Three steps of SGD with clipping in double. `loss(model, step)` is the same on all ranks.
template <typename Holder, typename Loss>
void compare(const std::function<Holder()>& make, const ParallelPlan& plan, const Loss& loss) {
  torch::manual_seed(11);
  Holder twin = make();
  torch::manual_seed(11);
  Holder model = make();
  twin->to(torch::kDouble);
  model->to(torch::kDouble);
  parallelize(*model, tensor_mesh(), plan);
  torch::optim::SGD reference(twin->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    const Tensor expected = loss(twin, step), actual = loss(model, step);
    ASSERT_NEAR(actual.item<double>(), expected.item<double>(), 1e-11) << "step " << step;
    reference.zero_grad();
    optimizer.zero_grad();
    expected.backward();
    actual.backward();
    const double norm = nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    ASSERT_NEAR(norm, nn::utils::clip_grad_norm_(twin->parameters(), 0.5), 1e-11) << "step " << step;
    reference.step();
    optimizer.step();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), 1e-9, 1e-12) << item.key();
}

Tensor draw(int64_t step, at::IntArrayRef sizes) {
  torch::manual_seed(500 + step);
  return torch::randn(sizes, torch::kDouble);
}

int64_t count_all_reduces(const std::function<void()>& call) {
  const CountCollectives counter;
  call();
  EXPECT_EQ(counter.total_calls(), counter.count(CollectiveKind::kAllReduce).calls);
  return counter.count(CollectiveKind::kAllReduce).calls;
}

TEST(ParallelModels, AnMlpOfAnyDims) {
  const auto make = [] { return nn::Sequential(nn::Linear(5, 24), nn::GELU(), nn::Linear(24, 7)); };
  const StrictSharding strict;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{3, 5}, {1, 5}, {2, 3, 5}, {2, 2, 2, 5}, {5}, {0, 5}}) {
    SCOPED_TRACE(c10::str(c10::IntArrayRef(sizes)));
    compare<nn::Sequential>(make, {{"0", Colwise{}}, {"2", Rowwise{}}}, [&](nn::Sequential& model, int64_t step) {
      return model->forward(draw(step, sizes)).square().sum();
    });
  }
}

TEST(ParallelModels, ConvolutionsByChannels) {
  const auto make = [] {
    return nn::Sequential(nn::Conv2d(3, 12, 3), nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(12, 5, 3).padding(1)), nn::Flatten(),
                          nn::Linear(5 * 4 * 4, 3));
  };
  compare<nn::Sequential>(make, {{"0", Colwise{}}, {"2", Rowwise{}}}, [&](nn::Sequential& model, int64_t step) {
    return model->forward(draw(step, {2, 3, 6, 6})).square().sum();
  });
  const auto with_norms = [] {
    return nn::Sequential(nn::BatchNorm2d(3), nn::Conv2d(3, 12, 3), nn::BatchNorm2d(12), nn::ReLU(), nn::Conv2d(12, 5, 3),
                          nn::BatchNorm2d(5));
  };
  compare<nn::Sequential>(with_norms, {{"1", Colwise{}}, {"4", Rowwise{}}}, [&](nn::Sequential& model, int64_t step) {
    if (step == 2) model->eval(); // by the running statistics
    return model->forward(draw(step, {4, 3, 6, 6})).square().mean();
  });
  const auto line = [] {
    return nn::Sequential(nn::Conv1d(3, 12, 3), nn::Tanh(), nn::Conv1d(nn::Conv1dOptions(12, 4, 1).bias(false)));
  };
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 3, 7}, {3, 7}}) {
    compare<nn::Sequential>(line, {{"0", Colwise{}}, {"2", Rowwise{}}}, [&](nn::Sequential& model, int64_t step) {
      return model->forward(draw(step, sizes)).square().sum();
    });
  }
}

struct RmsNormImpl : nn::Module {
  explicit RmsNormImpl(int64_t width) { weight = register_parameter("weight", torch::rand({width}) + 0.5); }
  Tensor forward(const Tensor& x) { return x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6) * weight; }
  Tensor weight;
};
TORCH_MODULE(RmsNorm);

/// RMSNorm of primitives, rotary embeddings, grouped queries, SwiGLU.
struct LlamaImpl : nn::Module {
  static constexpr int64_t kWidth = 48, kHeads = 12, kSize = 4, kHidden = 60, kVocabulary = 97;
  explicit LlamaImpl(int64_t kv_heads) : kv_heads(kv_heads) {
    const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
      return register_module(name, nn::Linear(nn::LinearOptions(in, out).bias(false)));
    };
    table = register_module("table", nn::Embedding(kVocabulary, kWidth));
    norm1 = register_module("norm1", RmsNorm(kWidth));
    q = linear("q", kWidth, kHeads * kSize);
    k = linear("k", kWidth, kv_heads * kSize);
    v = linear("v", kWidth, kv_heads * kSize);
    o = linear("o", kHeads * kSize, kWidth);
    norm2 = register_module("norm2", RmsNorm(kWidth));
    gate = linear("gate", kWidth, kHidden);
    up = linear("up", kWidth, kHidden);
    down = linear("down", kHidden, kWidth);
    head = linear("head", kWidth, kVocabulary);
  }
  static Tensor rotate(const Tensor& x) { // [b, h, t, size]
    const auto time = torch::arange(x.size(2), torch::kDouble).unsqueeze(1) * torch::tensor({1.0, 0.1}, torch::kDouble);
    const auto cosine = time.cos(), sine = time.sin();
    const auto even = x.slice(3, 0, kSize, 2), odd = x.slice(3, 1, kSize, 2);
    return torch::stack({even * cosine - odd * sine, even * sine + odd * cosine}, -1).flatten(3);
  }
  Tensor heads(const Tensor& x, int64_t count) const { return x.view({x.size(0), x.size(1), count, kSize}).transpose(1, 2); }
  Tensor forward(const Tensor& tokens) {
    auto x = table(tokens);
    const auto y = norm1(x);
    const auto groups = kHeads / kv_heads;
    const auto queries = rotate(heads(q(y), kHeads));
    const auto keys = rotate(heads(k(y), kv_heads)).repeat_interleave(groups, 1);
    const auto values = heads(v(y), kv_heads).repeat_interleave(groups, 1);
    const auto mixed = at::scaled_dot_product_attention(queries, keys, values, {}, 0.0, /*is_causal=*/true);
    x = x + o(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kHeads * kSize}));
    const auto z = norm2(x);
    x = x + down(torch::silu(gate(z)) * up(z));
    return head(x);
  }
  int64_t kv_heads;
  nn::Embedding table{nullptr};
  RmsNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr}, head{nullptr};
};
TORCH_MODULE(Llama);

ParallelPlan llama_plan(bool sequence) {
  const Placement stream = sequence ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"table", VocabParallel{stream}},
                    {"[qkv]", Colwise{}},
                    {"o", Rowwise{.output = stream}},
                    {"gate", Colwise{}},
                    {"up", Colwise{}},
                    {"down", Rowwise{.output = stream}},
                    {"head", VocabParallel{}}};
  if (sequence) plan.push_back({"norm?", Sequence{}});
  return plan;
}

TEST(ParallelModels, ALlamaBlock) {
  const StrictSharding strict;
  for (const bool sequence : {false, true}) {
    for (const int64_t batch : {1, 2}) {
      SCOPED_TRACE(c10::str(sequence ? "sequence" : "tensor", " parallel, batch ", batch));
      compare<Llama>([] { return Llama(12); }, llama_plan(sequence),
                     [&](Llama& model, int64_t step) {
                       const auto tokens = draw_tokens(step, batch, 9);
                       const auto ids = tokens.inputs.remainder(LlamaImpl::kVocabulary),
                                  labels = tokens.targets.remainder(LlamaImpl::kVocabulary);
                       return torch::cross_entropy_loss(model(ids).flatten(0, 1), labels.flatten());
                     });
    }
  }
}

TEST(ParallelModels, GroupedQueries) {
  const StrictSharding strict;
  for (const bool sequence : {false, true}) {
    for (const int64_t kv_heads : {6, 4, 3, 2, 1}) {
      SCOPED_TRACE(c10::str(sequence ? "sequence" : "tensor", " parallel, ", kv_heads, " kv heads"));
      auto plan = llama_plan(sequence);
      plan[1].modules = "q";
      plan.push_back({"[kv]", KeyHeads{kv_heads}});
      compare<Llama>([=] { return Llama(kv_heads); }, plan,
                     [&](Llama& model, int64_t step) {
                       const auto ids = draw_tokens(step, 2, 8).inputs.remainder(LlamaImpl::kVocabulary);
                       return model(ids).square().mean();
                     });
    }
  }
}

ParallelPlan encoder_plan(const std::string& layers) {
  return {{layers + ".self_attn", Colwise{}},
          {layers + ".self_attn.out_proj", Rowwise{}},
          {layers + ".linear1", Colwise{}},
          {layers + ".linear2", Rowwise{}}};
}

TEST(ParallelModels, LibTorchsTransformerEncoder) {
  const auto make = [] {
    return nn::TransformerEncoder(
        nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(24, 12).dim_feedforward(36).dropout(0.0), 2));
  };
  compare<nn::TransformerEncoder>(make, encoder_plan("layers.*"), [](nn::TransformerEncoder& model, int64_t step) {
    const auto mask = torch::triu(torch::full({5, 5}, -1e9, torch::kDouble), 1);
    return model->forward(draw(step, {5, 3, 24}), mask).square().mean();
  });
  if (world_size() == 1) return;
  auto model = make();
  parallelize(*model, tensor_mesh(), encoder_plan("layers.*"));
  Tensor loss;
  const auto x = draw(0, {5, 3, 24}).to(torch::kFloat);
  EXPECT_EQ(count_all_reduces([&] { loss = model->forward(x).square().mean(); }), 4);
  EXPECT_EQ(count_all_reduces([&] { loss.backward(); }), 3); // the input of the first layer has no gradient
}

/// Ranks with one seed drop what one process drops.
TEST(ParallelModels, DropoutDrawsForTheWholeActivation) {
  const auto make = [] {
    return nn::TransformerEncoder(
        nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(24, 12).dim_feedforward(36).dropout(0.3), 1));
  };
  compare<nn::TransformerEncoder>(make, encoder_plan("layers.*"), [](nn::TransformerEncoder& model, int64_t step) {
    const auto x = draw(step, {5, 3, 24});
    torch::manual_seed(900 + step);
    return model->forward(x).square().mean();
  });
}

TEST(ParallelModels, UnderAutocast) {
  const auto make = [] { return nn::Sequential(nn::Linear(5, 24), nn::GELU(), nn::Linear(24, 7)); };
  torch::manual_seed(4);
  auto twin = make();
  torch::manual_seed(4);
  auto model = make();
  parallelize(*model, tensor_mesh(), {{"0", Colwise{}}, {"2", Rowwise{}}});
  const auto x = draw(0, {3, 5}).to(torch::kFloat);
  const AutocastScope autocast;
  const auto expected = twin->forward(x), actual = model->forward(x);
  EXPECT_EQ(actual.scalar_type(), torch::kBFloat16);
  EXPECT_TENSORS_CLOSE(whole_of(actual).to(torch::kFloat), expected.detach().to(torch::kFloat), 0.05, 0.02);
  actual.to(torch::kFloat).sum().backward();
  EXPECT_TRUE(whole_of(model->parameters()[0].grad()).isfinite().all().item<bool>());
}

TEST(ParallelModels, LibTorchsTransformerWithCrossAttention) {
  const auto make = [] {
    return nn::Transformer(
        nn::TransformerOptions(24, 12).num_encoder_layers(1).num_decoder_layers(2).dim_feedforward(36).dropout(0.0));
  };
  auto plan = encoder_plan("encoder.layers.*");
  const auto decoder = encoder_plan("decoder.layers.*");
  plan.insert(plan.end(), decoder.begin(), decoder.end());
  plan.insert(plan.end(),
              {{"decoder.layers.*.multihead_attn", Colwise{}}, {"decoder.layers.*.multihead_attn.out_proj", Rowwise{}}});
  compare<nn::Transformer>(make, plan, [](nn::Transformer& model, int64_t step) {
    return model->forward(draw(step, {4, 2, 24}), draw(step + 50, {3, 2, 24})).square().mean();
  });
}

TEST(ParallelModels, RecurrentLayersAreReplicated) {
  struct NetImpl : nn::Module {
    NetImpl() {
      up = register_module("up", nn::Linear(5, 12));
      down = register_module("down", nn::Linear(12, 6));
      gru = register_module("gru", nn::GRU(6, 4));
    }
    Tensor forward(const Tensor& x) { return std::get<0>(gru->forward(down(torch::tanh(up(x))))); }
    nn::Linear up{nullptr}, down{nullptr};
    nn::GRU gru{nullptr};
  };
  struct Net : nn::ModuleHolder<NetImpl> {
    using nn::ModuleHolder<NetImpl>::ModuleHolder;
  };
  compare<Net>([] { return Net(std::make_shared<NetImpl>()); }, {{"up", Colwise{}}, {"down", Rowwise{}}},
               [](Net& model, int64_t step) {
                 return model->forward(draw(step, {4, 2, 5})).square().mean();
               });
}

} // namespace
} // namespace tessera::testing::models_test
