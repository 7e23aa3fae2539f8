#include "composed_net.h"

#include <tessera/activations/recompute.h>
#include <tessera/parallel/split_sequence.h>

#include <algorithm>
#include <mutex>

namespace tessera::testing::composed {

BlockImpl::BlockImpl(const NetOptions& options, bool attends) {
  if (attends) {
    dense = register_module("dense", GptBlock(NetOptions::kWidth, NetOptions::kHeads, NetOptions::kKeyHeads));
  } else {
    mlp = register_module("dense", MlpBlock(NetOptions::kWidth));
  }
  if (options.experts == 0) return;
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({NetOptions::kWidth})));
  MoEOptions of_experts{.width = NetOptions::kWidth, .hidden = 8, .experts = options.experts, .storage = options.storage};
  of_experts.bias_rate = 0.02;
  of_experts.route.score = RouterScore::kSigmoid;
  experts = register_module("experts", MoE(of_experts));
}

NetImpl::NetImpl(const NetOptions& net)
    : options(net),
      tokens(register_module("tokens", torch::nn::Embedding(NetOptions::kVocabulary, NetOptions::kWidth))),
      places(register_module("places", torch::nn::Embedding(NetOptions::kTime, NetOptions::kWidth))),
      blocks(register_module("blocks", torch::nn::ModuleList())),
      norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({NetOptions::kWidth})))) {
  for (int64_t i = 0; i < net.depth; ++i) blocks->push_back(Block(net, i < net.attending));
  if (!net.ties) {
    const auto linear = torch::nn::LinearOptions(NetOptions::kWidth, NetOptions::kVocabulary).bias(false);
    head = register_module("head", torch::nn::Linear(linear));
  }
}

torch::Tensor NetImpl::run_block(BlockImpl& block, const torch::Tensor& x, const Batch& batch) const {
  if (before_block) before_block(block, x);
  const auto run = [&] { return recomputes ? tessera::recompute(block, x) : block.forward(x); };
  const auto padding = std::get<3>(batch);
  if (padding < 0) return run();
  const ContextParallelScope scope(scheme, parts.at(padding));
  return run();
}

torch::Tensor NetImpl::forward(const Batch& batch) {
  auto x = embed(batch);
  for (auto& each : *blocks) x = run_block(*each->as<Block>(), x, batch);
  return logits(x);
}

Net make_net(const NetOptions& options, uint64_t seed) {
  static std::mutex mutex; // threads draw from one generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  Net net(options);
  net->to(options.dtype);
  if (options.float8) {
    for (auto& each : *net->blocks) {
      auto& block = *each->as<Block>();
      convert_to_float8(block.dense.is_empty() ? static_cast<torch::nn::Module&>(*block.mlp) : *block.dense,
                        {.scaling = *options.float8});
    }
  }
  const torch::NoGradGuard no_grad;
  net->tokens->weight.mul_(0.3);
  return net;
}

PipelineLayers layers_of(NetImpl& net) {
  PipelineLayers layers(net);
  auto* const model = &net;
  layers.add("embed", {"tokens", "places"}, [model](const Batch& batch) { return model->embed(batch); });
  layers.add_list("blocks", [model](BlockImpl& block, const torch::Tensor& x, const Batch& batch) {
    return model->run_block(block, x, batch);
  });
  layers.add("head", {"norm", net.options.ties ? "tokens.weight" : "head"},
             [model](const torch::Tensor& x) { return model->logits(x); });
  if (net.options.ties) layers.tie("tokens.weight");
  return layers;
}

Batch draw_batch(const NetOptions& options, uint64_t seed, int64_t rank, int64_t index) {
  auto generator = at::detail::createCPUGenerator(1000 * seed + 100 * static_cast<uint64_t>(rank) + static_cast<uint64_t>(index));
  const auto rows = 1 + (index + rank) % 3, longest = NetOptions::kTime;
  const auto time = options.experts > 0 ? longest : longest - index % 5;
  const auto text = torch::randint(NetOptions::kVocabulary, {rows, time + 1}, generator, torch::kLong);
  auto targets = text.slice(1, 1).clone();
  targets.select(1, 0).fill_(-100); // which does not count
  return {text.slice(1, 0, time).contiguous(), targets, torch::arange(time), -1};
}

Batch split_batch(NetImpl& net, const Batch& batch, const DeviceMesh& mesh, PartOrder order) {
  const auto& [tokens, targets, positions, unused] = batch;
  const auto parts = split_sequence({tokens, targets}, {1, 1}, mesh, {.order = order, .pad_values = {0, -100}});
  const auto padding = parts.length - tokens.size(1);
  net.parts[padding] = parts.mesh;
  return {parts.tensors[0].local(), parts.tensors[1].local(), to_local(parts.positions), padding};
}

torch::Tensor summed_loss(const torch::Tensor& logits, const Batch& batch) {
  const auto wide = logits.scalar_type() == torch::kDouble ? logits : logits.to(torch::kFloat);
  return torch::cross_entropy_loss(wide.flatten(0, 1), std::get<1>(batch).flatten(), {}, at::Reduction::Sum);
}

double counted(const Batch& batch) { return static_cast<double>(std::get<1>(batch).ge(0).sum().item<int64_t>()); }

} // namespace tessera::testing::composed
