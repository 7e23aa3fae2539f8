#include <tessera/plan/models/layer.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <absl/strings/str_join.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <utility>

#include <tessera/parallel/moe.h>
#include <tessera/plan/models/block.h>
#include <tessera/plan/models/fields.h>

namespace tessera::internal::models {

namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;

/// A function, and the module whose parameters it reads.
class Computed : public Layer {
 public:
  explicit Computed(Function function) : function_(std::move(function)) {}
  template <typename Holder>
  Computed(const std::string& name, const Holder& module)
      : function_([module](const at::Tensor& x) { return Holder(module)->forward(x); }) {
    register_module(name, module);
  }
  at::Tensor forward(const at::Tensor& x) override { return function_(x); }

 private:
  Function function_;
};

class Dropout : public Layer {
 public:
  explicit Dropout(double p) : p_(p) {}
  at::Tensor forward(const at::Tensor& x) override { return is_training() ? at::dropout(x, p_, /*train=*/true) : x; }

 private:
  double p_;
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(int64_t width, int64_t heads, int64_t key_heads, bool causal)
      : head_size_(width / heads), causal_(causal), grouped_(heads != key_heads) {
    const auto key_width = head_size_ * key_heads;
    query_ = register_module("query", torch::nn::Linear(width, width));
    key_ = register_module("key", torch::nn::Linear(width, key_width));
    value_ = register_module("value", torch::nn::Linear(width, key_width));
    output_ = register_module("output", torch::nn::Linear(width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {-1, head_size_}).transpose(1, 2); };
    const auto mixed = at::scaled_dot_product_attention(heads(query_->forward(x)), heads(key_->forward(x)),
                                                        heads(value_->forward(x)), {}, 0, causal_, std::nullopt, grouped_);
    return output_->forward(mixed.transpose(1, 2).flatten(2));
  }

 private:
  int64_t head_size_;
  bool causal_, grouped_;
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, output_{nullptr};
};
TORCH_MODULE(Attention);

using Made = std::shared_ptr<Layer>;
Made computed(Function function) { return std::make_shared<Computed>(std::move(function)); }
template <typename Holder>
Made computed(const std::string& name, const Holder& module) {
  return std::make_shared<Computed>(name, module);
}

/// "in", "out", or nothing.
std::string side_of(const JsonView& json) {
  if (!json.has("split")) return "";
  const auto& side = json["split"].string();
  if (side != "in" && side != "out") json["split"].fail("is \"" + side + "\", but must be \"in\" or \"out\"");
  return side;
}
Made linear_of(const JsonView& json) {
  side_of(json);
  const auto options = torch::nn::LinearOptions(positive(json, "in"), positive(json, "out")).bias(flag_or(json, "bias", true));
  return computed("linear", torch::nn::Linear(options));
}
Made embedding(const JsonView& json) {
  return computed("embedding", torch::nn::Embedding(positive(json, "vocabulary"), positive(json, "width")));
}
Made convolution(const JsonView& json) {
  const auto padding = json.has("padding") ? json["padding"].non_negative() : 0;
  const auto options = torch::nn::Conv2dOptions(positive(json, "in"), positive(json, "out"), positive(json, "kernel"))
                           .stride(positive_or(json, "stride", 1))
                           .padding(padding)
                           .bias(flag_or(json, "bias", true));
  return computed("conv2d", torch::nn::Conv2d(options));
}
Made attention(const JsonView& json) {
  const auto width = positive(json, "width"), heads = positive(json, "heads"), keys = positive_or(json, "key_heads", heads);
  if (width % heads != 0) json["heads"].fail(c10::str("is ", heads, ", of which ", width, " is no multiple"));
  if (heads % keys != 0) json["key_heads"].fail(c10::str("is ", keys, ", of which ", heads, " is no multiple"));
  return computed("attention", Attention(width, heads, keys, flag_or(json, "causal", true)));
}
Made mixture(const JsonView& json) {
  MoEOptions options{.width = positive(json, "width"), .hidden = positive(json, "hidden"), .experts = positive(json, "experts")};
  options.route.top_k = positive_or(json, "top_k", 2);
  if (options.route.top_k > options.experts)
    json["top_k"].fail(c10::str("is ", options.route.top_k, ", but there are ", options.experts, " experts"));
  return computed("mixture", MoE(options));
}
Made norm(const JsonView& json, NormKind kind) { return computed("norm", Norm(kind, positive(json, "width"), 1e-5)); }
Made dropout(const JsonView& json) { return std::make_shared<Dropout>(chance_or(json, "p", 0.1)); }

/// A kind of layer: the keys that it takes, and how it is made.
struct Kind {
  std::vector<std::string> keys;
  std::function<Made(const JsonView&)> make;
};
Kind function_of(at::Tensor (*function)(const at::Tensor&)) {
  return {{}, [function](const JsonView&) { return computed(Function(function)); }};
}

const std::map<std::string, Kind>& kinds() {
  static const std::map<std::string, Kind> kAll{
      {"linear", {{"in", "out", "bias", "split"}, linear_of}},
      {"embedding", {{"vocabulary", "width"}, embedding}},
      {"conv2d", {{"in", "out", "kernel", "stride", "padding", "bias"}, convolution}},
      {"attention", {{"width", "heads", "key_heads", "causal"}, attention}},
      {"mixture", {{"width", "hidden", "experts", "top_k"}, mixture}},
      {"layer_norm", {{"width"}, [](const JsonView& json) { return norm(json, NormKind::kLayer); }}},
      {"rms_norm", {{"width"}, [](const JsonView& json) { return norm(json, NormKind::kRms); }}},
      {"batch_norm",
       {{"channels"}, [](const JsonView& json) { return computed("norm", torch::nn::BatchNorm2d(positive(json, "channels"))); }}},
      {"dropout", {{"p"}, dropout}},
      {"max_pool",
       {{"size"},
        [](const JsonView& json) {
          const auto size = positive(json, "size");
          return computed([size](const at::Tensor& x) { return at::max_pool2d(x, {size, size}); });
        }}},
      {"average_pool", function_of([](const at::Tensor& x) {
         return at::adaptive_avg_pool2d(x, {1, 1});
       })},
      {"relu", function_of([](const at::Tensor& x) { return at::relu(x); })},
      {"gelu", function_of([](const at::Tensor& x) { return at::gelu(x); })},
      {"silu", function_of([](const at::Tensor& x) { return at::silu(x); })},
      {"tanh", function_of([](const at::Tensor& x) { return at::tanh(x); })},
      {"flatten", function_of([](const at::Tensor& x) { return x.flatten(1); })},
      {"mean", function_of([](const at::Tensor& x) { return x.mean(1); })}};
  return kAll;
}

Made make_layer(const JsonView& json, bool with_dropout) {
  const auto kind = json["kind"].string();
  if (kind == "residual") {
    check_keys(json, {"kind", "layers"});
    return std::make_shared<LayerList>(make_layers(json["layers"], with_dropout), /*adds=*/true);
  }
  if (kind == "repeat") {
    check_keys(json, {"kind", "times", "layers"});
    std::vector<Made> blocks;
    for (int64_t i = 0; i < positive(json, "times"); ++i)
      blocks.push_back(std::make_shared<LayerList>(make_layers(json["layers"], with_dropout), /*adds=*/false));
    return std::make_shared<LayerRepetition>(std::move(blocks));
  }
  const auto found = kinds().find(kind);
  if (found == kinds().end()) {
    std::vector<std::string> known{"residual", "repeat"};
    for (const auto& [name, value] : kinds()) known.push_back(name);
    json["kind"].fail("\"" + kind + "\" is unknown; the nearest is \"" + nearest_of(kind, known) +
                      "\", all are: " + absl::StrJoin(known, ", "));
  }
  auto keys = found->second.keys;
  keys.emplace_back("kind");
  check_keys(json, keys);
  auto made = found->second.make(json);
  return kind == "dropout" && !with_dropout ? computed([](const at::Tensor& x) { return x; }) : made;
}

void add_lines_of_layer(ParallelPlan& plan, const JsonView& json, const std::string& path) {
  const auto& kind = json["kind"].string();
  if (kind == "residual") return add_lines(plan, json["layers"], path + ".");
  if (kind == "repeat") return add_lines(plan, json["layers"], path + ".*.");
  if (kind == "embedding") plan.push_back({path + ".embedding", VocabParallel{}});
  if (kind == "attention") {
    plan.push_back({path + ".attention.query", Colwise{}});
    plan.push_back({path + ".attention.key", Colwise{}});
    plan.push_back({path + ".attention.value", Colwise{}});
    plan.push_back({path + ".attention.output", Rowwise{}});
  }
  const auto side = kind == "linear" ? side_of(json) : "";
  if (side.empty()) return;
  plan.push_back({path + ".linear", side == "out" ? ParallelStyle(Colwise{}) : Rowwise{}});
}

} // namespace

LayerList::LayerList(std::vector<std::shared_ptr<Layer>> layers, bool adds) : layers_(std::move(layers)), adds_(adds) {
  for (size_t i = 0; i < layers_.size(); ++i) register_module(std::to_string(i), layers_[i]);
}
at::Tensor LayerList::forward(const at::Tensor& x) {
  auto y = x;
  for (const auto& layer : layers_) y = layer->forward(y);
  return adds_ ? x + y : y;
}

LayerRepetition::LayerRepetition(std::vector<std::shared_ptr<Layer>> blocks) : blocks_(std::move(blocks)) {
  for (size_t i = 0; i < blocks_.size(); ++i) register_module(std::to_string(i), blocks_[i]);
}
at::Tensor LayerRepetition::forward(const at::Tensor& x) {
  auto y = x;
  for (const auto& block : blocks_) y = block->forward(y);
  return y;
}

void check_keys(const JsonView& json, const std::vector<std::string>& known) {
  for (const auto& [key, value] : json.fields()) {
    if (std::ranges::find(known, key) == known.end())
      json.fail("the key \"" + key + "\" is unknown here; the nearest is \"" + nearest_of(key, known) + "\"");
  }
}

std::vector<std::shared_ptr<Layer>> make_layers(const JsonView& array, bool with_dropout) {
  std::vector<Made> layers;
  for (const auto& json : array.elements()) layers.push_back(make_layer(json, with_dropout));
  if (layers.empty()) array.fail("holds no layer");
  return layers;
}

void add_lines(ParallelPlan& plan, const JsonView& array, const std::string& path) {
  const auto layers = array.elements();
  for (size_t i = 0; i < layers.size(); ++i) add_lines_of_layer(plan, layers[i], path + std::to_string(i));
}

} // namespace tessera::internal::models
