#include <tessera/plan/models/layers_config.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <utility>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/plan/models/fields.h>
#include <tessera/plan/models/layer.h>

namespace tessera::internal::models {

namespace {

/// What goes into the first layer: tokens, or features.
struct Input {
  std::vector<int64_t> sizes; ///< of a row
  int64_t vocabulary = 0;     ///< of tokens; 0: features
};

/// The config, which its functions read again for each module that they make.
struct Description {
  Json json;
  std::string where;
  Input input;
  bool is_classified = false, with_dropout = true;

  JsonView view() const { return {json, where}; }
};

Input read_input(const JsonView& json, int64_t sequence) {
  if (json.has("features")) {
    check_keys(json, {"features"});
    return {json["features"].non_negatives(), 0};
  }
  check_keys(json, {"tokens", "vocabulary"});
  const auto length = sequence > 0 ? sequence : json["tokens"].non_negative(), vocabulary = json["vocabulary"].non_negative();
  if (length == 0 || vocabulary == 0) json.fail("tokens and vocabulary must be positive");
  return {{length}, vocabulary};
}

at::Tensor counted(const std::vector<int64_t>& sizes, int64_t below, at::Device device) {
  return at::arange(c10::multiply_integers(sizes), at::TensorOptions(at::kLong).device(device)).remainder(below).view(sizes);
}

at::Tensor input_of(const Input& input, int64_t rows, at::Device device) {
  auto sizes = input.sizes;
  sizes.insert(sizes.begin(), rows);
  return input.vocabulary > 0 ? counted(sizes, input.vocabulary, device) : counted(sizes, 251, device).to(at::kFloat).div(251);
}

at::Tensor layers_loss(const Description& config, const at::Tensor& output) {
  const auto wide = output.to(at::kFloat);
  if (!config.is_classified) return wide.square().mean();
  auto sizes = output.sizes().vec();
  const auto classes = sizes.back();
  sizes.pop_back();
  return at::cross_entropy_loss(wide.dim() > 2 ? wide.flatten(0, -2) : wide, counted(sizes, classes, output.device()).flatten());
}

/// Calls `each(path, layer, is_block)` for each layer of the model, and for each block of a repetition.
template <typename Each>
void for_each_part(LayerList& model, const Each& each) {
  for (size_t i = 0; i < model.layers().size(); ++i) {
    const auto& layer = model.layers()[i];
    auto* const repetition = dynamic_cast<LayerRepetition*>(layer.get());
    if (!repetition) each(std::to_string(i), layer, false);
    for (size_t j = 0; repetition && j < repetition->blocks().size(); ++j)
      each(c10::str(i, '.', j), repetition->blocks()[j], true);
  }
}

/// Blocks alone are recomputed.
at::Tensor run_part(const std::shared_ptr<Layer>& layer, const at::Tensor& x, bool is_block, const PassSettings& settings) {
  return is_block && settings.recompute ? recompute(settings.recompute_options(), layer, x) : layer->forward(x);
}

at::Tensor run_all(LayerList& model, at::Tensor x, const PassSettings& settings) {
  for_each_part(model, [&](const std::string&, const std::shared_ptr<Layer>& layer, bool is_block) {
    x = run_part(layer, x, is_block, settings);
  });
  return x;
}

LayerList& list_of(torch::nn::Module& module) {
  auto* const list = dynamic_cast<LayerList*>(&module);
  TORCH_CHECK_VALUE(list, "a model that read_model plans was given a ", module.name());
  return *list;
}

PipelineLayers pipeline_of(LayerList& model, const PassSettings& settings) {
  PipelineLayers layers(model);
  for_each_part(model, [&](const std::string& path, const std::shared_ptr<Layer>& layer, bool is_block) {
    const auto members = layer->named_parameters().is_empty() ? std::vector<std::string>() : std::vector{path};
    layers.add(path, members,
               [layer, is_block, settings](const at::Tensor& x) { return run_part(layer, x, is_block, settings); });
  });
  return layers;
}

Description read(const JsonView& json, int64_t sequence, bool with_dropout) {
  check_keys(json, {"format", "version", "name", "input", "loss", "layers"});
  if (json["version"].integer() != 1) json["version"].fail("must be 1");
  Description config{.json = json.json(), .where = json.where(), .input = read_input(json["input"], sequence)};
  const auto& loss = json["loss"].string();
  if (loss != "cross_entropy" && loss != "mean_square")
    json["loss"].fail("is \"" + loss + "\", but must be \"cross_entropy\" or \"mean_square\"");
  config.is_classified = loss == "cross_entropy";
  config.with_dropout = with_dropout;
  return config;
}

/// The patterns of a model's blocks, and the experts in it.
void describe(PlannedModel& model, const JsonView& layers) {
  const auto all = layers.elements();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i]["kind"].string() == "repeat") model.groups.push_back(c10::str(i, ".*"));
  }
  const std::function<void(const JsonView&)> find_experts = [&](const JsonView& list) {
    for (const auto& layer : list.elements()) {
      if (layer.has("layers")) find_experts(layer["layers"]);
      if (layer["kind"].string() == "mixture") model.experts = layer["experts"].integer();
    }
  };
  find_experts(layers);
}

void check_vocabulary(const JsonView& layers, int64_t tokens) {
  const auto first = layers.elements().front();
  if (tokens == 0 || first["kind"].string() != "embedding") return;
  const auto rows = first["vocabulary"].integer();
  if (rows < tokens) first["vocabulary"].fail(c10::str("is ", rows, ", but the input has a vocabulary of ", tokens));
}

} // namespace

bool is_layers_config(const JsonView& json) { return json.has("format") && json["format"].string() == kLayersFormat; }

PlannedModel plan_layers(const JsonView& json, int64_t sequence, bool with_dropout) {
  const auto config = read(json, sequence, with_dropout);
  PlannedModel model;
  model.name = json.has("name") ? json["name"].string() : "layers";
  on_meta([&] { return make_layers(json["layers"], config.with_dropout); }); // so that errors come here
  check_vocabulary(json["layers"], config.input.vocabulary);
  describe(model, json["layers"]);
  model.build = [config] {
    return std::make_shared<LayerList>(make_layers(config.view()["layers"], config.with_dropout), /*adds=*/false);
  };
  model.batch = [config](const PassSettings& settings, at::Device device) {
    return PipelineValue(input_of(config.input, settings.rows, device));
  };
  model.loss = [config](torch::nn::Module& module, const PipelineValue& batch, const PassSettings& settings) {
    return layers_loss(config, run_all(list_of(module), batch.toTensor(), settings));
  };
  model.tensor_parallel = [config](torch::nn::Module&, const PlanOptions&) {
    ParallelPlan plan;
    add_lines(plan, config.view()["layers"], "");
    return plan;
  };
  model.layers = [](torch::nn::Module& module, const PassSettings& settings) { return pipeline_of(list_of(module), settings); };
  model.pipeline_loss.sum = [config](const PipelineValue& output, const PipelineValue&) {
    return layers_loss(config, output.toTensor());
  };
  model.sequence = config.input.vocabulary > 0 ? config.input.sizes[0] : 0;
  return model;
}

} // namespace tessera::internal::models
