// Modules and operators: each model trains sharded as it trains unsharded.
#include <gtest/gtest.h>

#include <torch/script.h>

#include <tessera/fsdp/unsharded.h>
#include <tessera/nn/script_module.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>

namespace tessera::testing::modules_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

/// One module, between two linear layers that form groups of their own.
template <typename Holder>
struct Around : CaseModel {
  explicit Around(Holder middle_module)
      : first(register_module("first", nn::Linear(kWidth, kWidth))),
        middle(register_module("middle", std::move(middle_module))),
        last(register_module("last", nn::Linear(kWidth, 1))) {}
  nn::Linear first;
  Holder middle;
  nn::Linear last;
};

/// `apply` says how the module is called with a [4, kWidth] tensor; the result has kWidth columns.
template <typename Holder>
EquivalenceCase around(std::string name, const std::function<Holder()>& make,
                       const std::function<Tensor(Holder&, const Tensor&)>& apply) {
  struct Model : Around<Holder> {
    Model(Holder module, std::function<Tensor(Holder&, const Tensor&)> apply_module)
        : Around<Holder>(std::move(module)), apply(std::move(apply_module)) {}
    Tensor loss(const Tensor& x) override { return this->last(apply(this->middle, this->first(x))).square().mean(); }
    std::function<Tensor(Holder&, const Tensor&)> apply;
  };
  return {std::move(name), [make, apply] { return std::make_shared<Model>(make(), apply); }};
}

struct InPlaceActivations : CaseModel {
  InPlaceActivations()
      : a(register_module("a", nn::Linear(kWidth, 9))),
        b(register_module("b", nn::Linear(9, kWidth))),
        relu(register_module("relu", nn::ReLU(nn::ReLUOptions().inplace(true)))) {}
  Tensor loss(const Tensor& x) override {
    auto h = relu(a(x));
    h = b(h + 1).mul_(2).add_(1);
    return h.tanh_().square().mean();
  }
  nn::Linear a, b;
  nn::ReLU relu;
};

struct AnyModules : CaseModel {
  AnyModules() {
    sequence =
        nn::Sequential(nn::Linear(kWidth, 8), nn::Functional(torch::tanh),
                       nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({8}))), nn::Linear(nn::LinearOptions(8, 3).bias(false)));
    register_module("sequence", sequence);
    any = nn::AnyModule(nn::Linear(3, 2));
    register_module("any", any.ptr());
    using Named = std::pair<std::string, std::shared_ptr<nn::Module>>;
    by_name = register_module("by_name", nn::ModuleDict(std::vector<Named>{{"out", nn::Linear(2, 1).ptr()}}));
    list = register_module("list", nn::ParameterList());
    list->append(torch::ones({2}));
    list->append(torch::full({1, 2}, 0.5));
  }
  Tensor loss(const Tensor& x) override {
    auto y = any.forward<Tensor>(sequence->forward(x)) * list[0] + list[1];
    return by_name["out"]->as<nn::Linear>()->forward(y).square().mean();
  }
  nn::Sequential sequence{nullptr};
  nn::AnyModule any;
  nn::ModuleDict by_name{nullptr};
  nn::ParameterList list{nullptr};
};

/// `weight.t()` made once in a forward and read twice.
struct CachedTranspose : CaseModel {
  CachedTranspose() : a(register_module("a", nn::Linear(kWidth, kWidth))), b(register_module("b", nn::Linear(kWidth, kWidth))) {}
  Tensor loss(const Tensor& x) override {
    const auto transposed = a->weight.t();
    auto y = x.mm(transposed).tanh();
    y = b(y);
    return y.mm(transposed).square().mean();
  }
  Allowance allowance() const override { return {2, "the transpose of a is read again after b's group replaced a's"}; }
  nn::Linear a, b;
};

/// `weight.t()` made in the first forward and kept for all that follow.
struct TransposeKeptForever : CachedTranspose {
  Tensor loss(const Tensor& x) override {
    if (!kept.defined()) kept = a->weight.t();
    return b(x.mm(kept).tanh()).square().mean();
  }
  Allowance allowance() const override { return {}; }
  bool can_move() const override { return false; }
  Tensor kept;
};

struct SlicesAndChunks : CaseModel {
  SlicesAndChunks()
      : weight(register_parameter("weight", torch::randn({3 * kWidth, kWidth}))),
        out(register_module("out", nn::Linear(kWidth, 1))) {}
  Tensor loss(const Tensor& x) override {
    const auto qkv = weight.chunk(3);
    const auto split = weight.split({kWidth, 2 * kWidth});
    auto y = x.mm(qkv[0]).sigmoid() * x.mm(qkv[1]) + x.mm(split[1].slice(0, 0, kWidth)) + x * weight[2];
    y = y + x.mm(weight.index({torch::indexing::Slice(1, 1 + kWidth)}).transpose(0, 1)) + x.mm(weight.unbind()[0].diag());
    return out(y).square().mean();
  }
  Tensor weight;
  nn::Linear out;
};

struct DetachInForward : CaseModel {
  DetachInForward() : a(register_module("a", nn::Linear(kWidth, kWidth))), b(register_module("b", nn::Linear(kWidth, kWidth))) {}
  Tensor loss(const Tensor& x) override {
    const auto frozen_copy = x.mm(a->weight.detach());
    const auto scale = b->weight.detach().abs().mean();
    return (a(x) * frozen_copy + b(x) * scale).square().mean();
  }
  Allowance allowance() const override { return {2, "b is read, then a, then b again"}; }
  nn::Linear a, b;
};

/// A module whose forward gives its parameter away.
struct GiverImpl : nn::Module {
  GiverImpl() : weight(register_parameter("weight", torch::randn({kWidth, kWidth}))) {}
  Tensor forward() { return weight; }
  Tensor weight;
};
TORCH_MODULE(Giver);

struct ParameterReturned : CaseModel {
  ParameterReturned() : giver(register_module("giver", Giver())), b(register_module("b", nn::Linear(kWidth, kWidth))) {}
  Tensor loss(const Tensor& x) override {
    const auto weight = giver();
    return b(x.mm(weight)).square().mean() + weight.square().mean();
  }
  Allowance allowance() const override { return {2, "the returned weight is read after b"}; }
  Giver giver;
  nn::Linear b;
};

/// A child that reads a parameter of its parent.
struct ReadsParentImpl : nn::Module {
  ReadsParentImpl() : own(register_module("own", nn::Linear(kWidth, kWidth))) {}
  Tensor forward(const Tensor& x, const Tensor& scale) { return own(x) * scale; }
  nn::Linear own;
};
TORCH_MODULE(ReadsParent);

struct ParentParameterInChild : CaseModel {
  ParentParameterInChild()
      : scale(register_parameter("scale", torch::ones({kWidth}))),
        a(register_module("a", ReadsParent())),
        b(register_module("b", ReadsParent())) {}
  Tensor loss(const Tensor& x) override { return b(a(x, scale).tanh(), scale).square().mean(); }
  Tensor scale;
  ReadsParent a, b;
};

/// y = x w³, with w saved for backward. Grad mode is off in its forward, where an op on the parameter alone is one on the
/// DTensor.
struct SavesParameter : torch::autograd::Function<SavesParameter> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(unsharded(weight).pow(3));
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].pow(3).t()), saved[0].t().mm(gradients[0]) * 3 * saved[1].square()};
  }
};

struct CustomFunction : CaseModel {
  CustomFunction()
      : weight(register_parameter("weight", torch::randn({kWidth, kWidth}) * 0.3)),
        a(register_module("a", nn::Linear(kWidth, kWidth))),
        b(register_module("b", nn::Linear(kWidth, 1))) {}
  Tensor loss(const Tensor& x) override {
    return b(SavesParameter::apply(SavesParameter::apply(a(x), weight), a->weight)).square().mean();
  }
  Tensor weight;
  nn::Linear a, b;
};

/// Code that works on raw pointers.
struct RawPointers : CaseModel {
  RawPointers() : a(register_module("a", nn::Linear(kWidth, kWidth))), b(register_module("b", nn::Linear(kWidth, 1))) {}
  Tensor loss(const Tensor& x) override {
    const auto weight = unsharded(a->weight);
    const auto* data = weight.const_data_ptr<float>();
    float largest = 0;
    for (int64_t i = 0; i < weight.numel(); ++i) largest = std::max(largest, std::abs(data[i]));
    return b(x.mm(weight.t()) / largest).square().mean();
  }
  nn::Linear a, b;
};

Tensor as_sequence(const Tensor& x) { return x.view({2, 2, kWidth}); }
Tensor as_rows(const Tensor& x) { return x.reshape({4, kWidth}); }

std::vector<EquivalenceCase> layers() {
  return {
      around<nn::Linear>(
          "linear_without_bias", [] { return nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)); },
          [](nn::Linear& m, const Tensor& x) { return m(x); }),
      around<nn::Bilinear>(
          "bilinear", [] { return nn::Bilinear(kWidth, kWidth, kWidth); },
          [](nn::Bilinear& m, const Tensor& x) { return m(x, x.tanh()); }),
      around<nn::PReLU>(
          "prelu", [] { return nn::PReLU(nn::PReLUOptions().num_parameters(kWidth)); },
          [](nn::PReLU& m, const Tensor& x) { return m(x); }),
      around<nn::LayerNorm>(
          "layer_norm", [] { return nn::LayerNorm(nn::LayerNormOptions({kWidth})); },
          [](nn::LayerNorm& m, const Tensor& x) { return m(x); }),
      around<nn::GroupNorm>(
          "group_norm", [] { return nn::GroupNorm(nn::GroupNormOptions(2, kWidth)); },
          [](nn::GroupNorm& m, const Tensor& x) { return m(x); }),
      around<nn::InstanceNorm1d>(
          "instance_norm", [] { return nn::InstanceNorm1d(nn::InstanceNorm1dOptions(2).affine(true)); },
          [](nn::InstanceNorm1d& m, const Tensor& x) { return as_rows(m(as_sequence(x))); }),
      around<nn::Conv1d>(
          "conv1d", [] { return nn::Conv1d(nn::Conv1dOptions(2, 2, 3).padding(1)); },
          [](nn::Conv1d& m, const Tensor& x) { return as_rows(m(as_sequence(x))); }),
      around<nn::Conv2d>(
          "conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(1, 1, 3).padding(1)); },
          [](nn::Conv2d& m, const Tensor& x) {
            return as_rows(m(x.view({2, 1, 2, kWidth})));
          }),
      around<nn::Conv3d>(
          "conv3d",
          [] {
            return nn::Conv3d(nn::Conv3dOptions(1, 1, {1, 1, 3}).padding({0, 0, 1}));
          },
          [](nn::Conv3d& m, const Tensor& x) {
            return as_rows(m(x.view({1, 1, 2, 2, kWidth})));
          }),
      around<nn::ConvTranspose2d>(
          "conv_transpose2d", [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(1, 1, 3).padding(1)); },
          [](nn::ConvTranspose2d& m, const Tensor& x) {
            return as_rows(m(x.view({2, 1, 2, kWidth})));
          }),
      around<nn::EmbeddingBag>(
          "embedding_bag", [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(11, kWidth).mode(torch::kSum)); },
          [](nn::EmbeddingBag& m, const Tensor& x) {
            const auto tokens = (x.detach().abs() * 100).to(torch::kLong).remainder(11);
            return m(tokens, Tensor(), x.sigmoid());
          }),
      around<nn::Embedding>(
          "embedding_with_padding", [] { return nn::Embedding(nn::EmbeddingOptions(11, kWidth).padding_idx(0)); },
          [](nn::Embedding& m, const Tensor& x) {
            const auto tokens = (x.detach().abs() * 100).to(torch::kLong).remainder(11);
            return x + m(tokens).mean(1);
          }),
      around<nn::LSTM>(
          "lstm", [] { return nn::LSTM(nn::LSTMOptions(kWidth, 3).num_layers(2).bidirectional(true).dropout(0.1)); },
          [](nn::LSTM& m, const Tensor& x) { return as_rows(std::get<0>(m(as_sequence(x)))); }),
      around<nn::GRU>(
          "gru", [] { return nn::GRU(nn::GRUOptions(kWidth, kWidth).batch_first(true)); },
          [](nn::GRU& m, const Tensor& x) { return as_rows(std::get<0>(m(as_sequence(x)))); }),
      around<nn::RNN>(
          "rnn", [] { return nn::RNN(nn::RNNOptions(kWidth, kWidth)); },
          [](nn::RNN& m, const Tensor& x) { return as_rows(std::get<0>(m(as_sequence(x)))); }),
      around<nn::LSTMCell>(
          "lstm_cell", [] { return nn::LSTMCell(kWidth, kWidth); },
          [](nn::LSTMCell& m, const Tensor& x) {
            const auto [h, c] = m(x);
            return std::get<0>(m(x * c, std::make_tuple(h, c)));
          }),
      around<nn::MultiheadAttention>(
          "multihead_attention", [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, 2).dropout(0.1)); },
          [](nn::MultiheadAttention& m, const Tensor& x) {
            const auto sequence = as_sequence(x);
            return as_rows(std::get<0>(m(sequence, sequence, sequence)));
          }),
      around<nn::MultiheadAttention>(
          "multihead_attention_other_widths",
          [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, 3).kdim(3).vdim(3).add_bias_kv(true)); },
          [](nn::MultiheadAttention& m, const Tensor& x) {
            const auto sequence = as_sequence(x);
            return as_rows(std::get<0>(m(sequence, sequence.slice(2, 0, 3), sequence.slice(2, 0, 3))));
          }),
      around<nn::TransformerEncoderLayer>(
          "transformer_encoder_layer",
          [] {
            return nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(10).dropout(0.1));
          },
          [](nn::TransformerEncoderLayer& m, const Tensor& x) { return as_rows(m(as_sequence(x))); }),
      around<nn::Transformer>(
          "transformer", [] { return nn::Transformer(nn::TransformerOptions(kWidth, 2, 1, 1).dim_feedforward(8).dropout(0.1)); },
          [](nn::Transformer& m, const Tensor& x) { return as_rows(m(as_sequence(x), as_sequence(x.tanh()))); }),
  };
}

/// Batch norm's statistics are those of one rank's batch, as everywhere in data parallel: all ranks see the same data here, so
/// that the running statistics can be compared as well.
/// Without a bias before the norm: its gradient is zero but for rounding, of which Adam would make steps of full length.
struct BatchNorms : SameDataEverywhere {
  BatchNorms()
      : a(register_module("a", nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)))),
        norm1(register_module("norm1", nn::BatchNorm1d(kWidth))),
        norm2(register_module("norm2", nn::BatchNorm2d(nn::BatchNorm2dOptions(2).momentum(0.3)))),
        b(register_module("b", nn::Linear(kWidth, 1))) {}
  Tensor loss(const Tensor& x) override {
    const auto y = norm1(a(x)).view({2, 2, 1, kWidth});
    return b(norm2(y).reshape({4, kWidth})).square().mean();
  }
  nn::Linear a;
  nn::BatchNorm1d norm1;
  nn::BatchNorm2d norm2;
  nn::Linear b;
};

/// A TorchScript module is no nn::Module; its parameters are sharded where the module that holds it registers them.
struct TorchScript : CaseModel {
  TorchScript() : first(register_module("first", nn::Linear(kWidth, kWidth))), script("Script") {
    script.register_parameter("weight", torch::randn({5, kWidth}).set_requires_grad(true), /*is_buffer=*/false);
    script.define("def forward(self, x):\n  return torch.tanh(torch.linear(x, self.weight) * 0.5 + 1.0)\n");
    for (const auto& parameter : script.named_parameters()) register_parameter("script_" + parameter.name, parameter.value);
  }
  Tensor loss(const Tensor& x) override {
    const PlainExecutor plain;
    return script.forward({first(x)}).toTensor().square().mean();
  }
  nn::Linear first;
  torch::jit::Module script;
};

std::vector<EquivalenceCase> all_modules() {
  auto cases = layers();
  for (auto& each : std::vector<EquivalenceCase>{
           equivalence_case<InPlaceActivations>("in_place_activations"),
           equivalence_case<AnyModules>("sequential_and_any_module"), equivalence_case<BatchNorms>("batch_norm"),
           equivalence_case<CachedTranspose>("cached_transpose"),
           equivalence_case<TransposeKeptForever>("transpose_kept_forever"),
           equivalence_case<SlicesAndChunks>("slices_and_chunks"), equivalence_case<DetachInForward>("detach_in_forward"),
           equivalence_case<ParameterReturned>("parameter_returned"),
           equivalence_case<ParentParameterInChild>("parent_parameter_in_child"),
           equivalence_case<CustomFunction>("custom_function"), equivalence_case<TorchScript>("torch_script")})
    cases.push_back(std::move(each));
  if (tests_the_cpu()) cases.push_back(equivalence_case<RawPointers>("raw_pointers")); // of the host
  return cases;
}

class Modules : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Modules, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Equivalence, Modules, ::testing::ValuesIn(with_all_strategies(all_modules())), param_name);

} // namespace
} // namespace tessera::testing::modules_test
