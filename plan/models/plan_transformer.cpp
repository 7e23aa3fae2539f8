#include <tessera/plan/models/plan_transformer.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <optional>
#include <tuple>

#include <tessera/dtensor/api.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>
#include <tessera/plan/models/transformer.h>

namespace tessera::internal::models {

namespace {

using Batch = std::tuple<at::Tensor, at::Tensor, at::Tensor>; ///< what the model takes, labels, and positions

TransformerImpl& transformer(torch::nn::Module& module) {
  auto* const model = module.as<TransformerImpl>();
  TORCH_CHECK_VALUE(model, "a model that read_model plans was given a ", module.name());
  return *model;
}

/// Made up: numbers below `below`, neighbours of which differ.
at::Tensor numbers(const std::vector<int64_t>& sizes, int64_t below, int64_t step, at::Device device) {
  const auto count = c10::multiply_integers(sizes);
  return (at::arange(count, at::TensorOptions(at::kLong).device(device)) * step).remainder(below).view(sizes);
}

PipelineValue batch_of(const TransformerConfig& config, int64_t sequence, const PassSettings& settings, at::Device device) {
  const auto rows = settings.rows;
  if (config.takes_pictures()) {
    const auto pictures = numbers({rows, config.channels, config.image, config.image}, 251, 1, device).to(at::kFloat).div(251);
    return Batch{pictures, numbers({rows}, config.classes, 7, device), numbers({1}, 1, 1, device)};
  }
  const auto tokens = numbers({rows, sequence}, config.vocabulary, 1, device),
             labels = numbers({rows, sequence}, config.vocabulary, 7, device);
  if (!settings.context.defined()) return Batch{tokens, labels, numbers({sequence}, sequence, 1, device)};
  const auto parts =
      split_sequence({tokens, labels}, {1, 1}, settings.context, {.order = settings.context_order, .compares_values = false});
  return Batch{parts.tensors[0], parts.tensors[1], parts.positions};
}

/// This rank's part of a batch, in the scope that its attention needs.
struct OwnPart {
  OwnPart(const Batch& batch, const PassSettings& settings)
      : input(local(std::get<0>(batch))), labels(local(std::get<1>(batch))), positions(local(std::get<2>(batch))) {
    if (is_dtensor(std::get<0>(batch))) scope.emplace(settings.context_scheme, DTensor(std::get<0>(batch)).mesh());
  }
  static at::Tensor local(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(DTensor(tensor)) : tensor; }

  at::Tensor input, labels, positions;
  std::optional<ContextParallelScope> scope;
};

at::Tensor loss_of(const TransformerConfig& config, const at::Tensor& output, const at::Tensor& labels) {
  const auto wide = output.to(output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (config.head == Head::kNone || config.head == Head::kPooled) return wide.square().mean();
  return at::cross_entropy_loss(wide.flatten(0, -2), labels.flatten());
}

PipelineLayers layers_of(TransformerImpl& model, const PassSettings& settings) {
  const auto& config = model.config();
  PipelineLayers layers(model);
  layers.add("embedding", model.embedding_members(), [&model, settings](const Batch& batch) {
    const OwnPart own(batch, settings);
    return model.embed(own.input, own.positions);
  });
  for (int64_t i = 0; i < config.layers; ++i) {
    const auto name = config.names.blocks + "." + std::to_string(i);
    layers.add(name, {name}, [&model, settings, block = model.block(i)](const at::Tensor& x, const Batch& batch) {
      const OwnPart own(batch, settings);
      return run_block(block, x, model.surroundings(own.positions), settings);
    });
  }
  layers.add("head", model.head_members(), [&model](const at::Tensor& x) { return model.finish(x); });
  if (config.is_tied) layers.tie(config.names.tokens + ".weight");
  return layers;
}

ParallelPlan tensor_plan(const TransformerConfig& config, const PlanOptions& options) {
  const auto& [names, block, ranks] = std::tie(config.block_names, config.block, options.ranks);
  TORCH_CHECK_VALUE(block.heads % ranks == 0, config.name, ": ", block.heads, " heads do not divide among ", ranks,
                    " ranks of tp");
  const auto stream = options.sequence ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan;
  const auto add = [&](const std::string& path, const ParallelStyle& style) {
    if (!path.empty()) plan.push_back({config.names.blocks + ".*." + path, style});
  };
  if (!config.takes_pictures()) plan.push_back({config.names.tokens, VocabParallel{stream}});
  add(names.query, Colwise{});
  add(names.key, KeyHeads{block.key_heads});
  add(names.value, KeyHeads{block.key_heads});
  add(names.packed, Colwise{.packed = 3});
  add(names.output, Rowwise{.output = stream});
  if (block.experts == 0) {
    add(names.gate, Colwise{});
    add(names.up, Colwise{});
    add(names.down, Rowwise{.output = stream});
  }
  if (config.head == Head::kLanguage && !config.is_tied) plan.push_back({config.names.head, VocabParallel{}});
  if (!options.sequence) return plan;
  add(names.attention_norm, Sequence{});
  add(names.feed_forward_norm, Sequence{});
  if (config.has_norm) plan.push_back({config.names.norm, Sequence{}});
  return plan;
}

} // namespace

double flops_a_row(const TransformerConfig& config, int64_t sequence) {
  const auto& block = config.block;
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const double width = number(block.width), inner = number(block.heads * block.head_size);
  const double projections = width * (2 * inner + 2 * number(block.key_heads * block.head_size));
  const double feed_forward = width * number(block.hidden) * (block.is_gated ? 3 : 2);
  const double mixture = block.experts > 0 ? number(block.top_k) * feed_forward + width * number(block.experts) : feed_forward;
  const double length = number(config.length(sequence));
  double weights = length * number(config.layers) * (projections + mixture);
  if (config.takes_pictures()) weights += length * width * number(config.channels * config.patch * config.patch);
  if (config.head == Head::kLanguage || config.head == Head::kMasked) weights += length * width * number(config.vocabulary);
  if (config.head == Head::kMasked) weights += length * width * width;
  if (config.head == Head::kClassifier) weights += width * number(config.classes);
  if (config.head == Head::kPooled) weights += width * width;
  return 6 * weights + 12 * number(config.layers) * inner * length * length;
}

PlannedModel plan_transformer(const TransformerConfig& config, int64_t sequence) {
  PlannedModel model;
  model.name = config.name;
  model.build = [config] { return std::make_shared<TransformerImpl>(config); };
  model.groups = {config.names.blocks + ".*"};
  model.batch = [config, sequence](const PassSettings& settings, at::Device device) {
    return batch_of(config, sequence, settings, device);
  };
  model.loss = [config](torch::nn::Module& module, const PipelineValue& batch, const PassSettings& settings) {
    const OwnPart own(batch.to<Batch>(), settings);
    return loss_of(config, transformer(module).forward(own.input, own.positions, settings), own.labels);
  };
  model.tensor_parallel = [config](torch::nn::Module&, const PlanOptions& options) { return tensor_plan(config, options); };
  model.layers = [](torch::nn::Module& module, const PassSettings& settings) { return layers_of(transformer(module), settings); };
  model.pipeline_loss.sum = [config](const PipelineValue& output, const PipelineValue& batch) {
    return loss_of(config, output.toTensor(), OwnPart(batch.to<Batch>(), {}).labels);
  };
  if (config.head == Head::kLanguage && !config.is_tied) model.not_in_float8 = {config.names.head};
  model.experts = config.block.experts;
  model.sequence = config.takes_pictures() ? 0 : sequence;
  model.splits_sequence = !config.takes_pictures() && config.block.attention_dropout == 0 && config.head != Head::kPooled &&
                          config.block.fuses_attention && (config.block.window == 0 || config.block.window >= sequence);
  model.flops_a_row = flops_a_row(config, sequence);
  return model;
}

} // namespace tessera::internal::models
