#pragma once

// A small model with experts, trained beside one process.

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/parallelize.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

inline constexpr int64_t kMixtureRows = 24, kMixtureTime = 4, kMixtureWidth = 16, kMixtureExperts = 12;

inline MoEOptions mixture_options() {
  MoEOptions options{.width = kMixtureWidth, .hidden = 8, .experts = kMixtureExperts};
  options.losses = {.balance = 0.05, .z = 0.01};
  options.bias_rate = 0.02;
  options.route.score = RouterScore::kSigmoid;
  return options;
}

/// Two layers with experts, and one that tensor parallelism splits.
struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(const MoEOptions& options)
      : stem(register_module("stem", torch::nn::Linear(6, kMixtureWidth))),
        up(register_module("up", torch::nn::Linear(kMixtureWidth, 2 * kMixtureWidth))),
        down(register_module("down", torch::nn::Linear(2 * kMixtureWidth, kMixtureWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kMixtureWidth})))),
        first(register_module("first", MoE(options))),
        second(register_module("second", MoE(options))),
        head(register_module("head", torch::nn::Linear(kMixtureWidth, 3))) {}

  torch::Tensor layer(MoE& moe, const torch::Tensor& x) const {
    return recomputes ? tessera::recompute(moe, x) : moe->forward(x);
  }
  torch::Tensor forward(const torch::Tensor& input) {
    auto x = stem(input);
    x = x + layer(first, x);
    x = x + down(torch::gelu(up(x)));
    return head(x + layer(second, norm(x)));
  }

  bool recomputes = false;
  torch::nn::Linear stem, up, down;
  torch::nn::LayerNorm norm;
  MoE first, second;
  torch::nn::Linear head;
};
TORCH_MODULE(Mixture);

inline Mixture seeded_mixture(const MoEOptions& options) {
  torch::manual_seed(11);
  return Mixture(options);
}

struct MixtureBatch {
  explicit MixtureBatch(int64_t step) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(900 + step));
    inputs = torch::randn({kMixtureRows, kMixtureTime, 6}, generator);
    targets = torch::randn({kMixtureRows, kMixtureTime, 3}, generator);
  }
  torch::Tensor inputs, targets;
};

/// How the ranks lie, and what is crossed with it.
struct MixtureCase {
  int64_t replicas = 1, shards = 1, tensor = 1, experts = 1; ///< experts × efsdp = shards × tensor
  bool recomputes = false, splits_sequences = false;
  int64_t micro_batches = 1;
  int64_t steps = 20;

  int64_t ranks() const { return replicas * shards * tensor; }
  int64_t data_ranks() const { return replicas * shards; }
  bool divides_batch() const { return kMixtureRows % (data_ranks() * micro_batches) == 0; }
  std::string text() const {
    return c10::str(replicas, " x ", shards, " x ", tensor, ", experts on ", experts, recomputes ? ", recomputed" : "",
                    splits_sequences ? ", sequence parallel" : "", ", ", micro_batches, " micro-batches");
  }
};

/// Cases that fill a world.
inline std::vector<MixtureCase> mixture_cases(int64_t world) {
  std::vector<MixtureCase> cases;
  for (const int64_t replicas : {1, 2}) {
    for (const int64_t tensor : {1, 2, 4}) {
      if (world % (replicas * tensor) != 0) continue;
      const auto shards = world / replicas / tensor;
      for (int64_t experts = 1; experts <= std::min(shards * tensor, kMixtureExperts); ++experts) {
        if ((shards * tensor) % experts == 0 && kMixtureExperts % experts == 0)
          cases.push_back({.replicas = replicas, .shards = shards, .tensor = tensor, .experts = experts});
      }
    }
  }
  return cases;
}

struct MixtureResult {
  std::vector<double> losses, norms, balance;
  std::map<std::string, torch::Tensor> weights; ///< and buffers; whole ones, of those that this rank has
};

/// Parameters and buffers, whole. Every rank that has parts of them calls it.
inline std::map<std::string, torch::Tensor> whole_weights(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> weights;
  for (const auto& items : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : items)
      weights[item.key()] = is_dtensor(item.value()) ? DTensor(item.value().detach()).full_tensor() : item.value().detach();
  }
  return weights;
}

/// Steps of SGD with clipping. The forward is of micro-batch `index` of `count` of this rank's rows.
inline MixtureResult train_mixture(Mixture& model, const MixtureCase& plan, int64_t data_rank, int64_t data_ranks) {
  MixtureResult result;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  const auto parts = data_ranks * plan.micro_batches;
  set_router_loss_scale(*model, 1.0 / static_cast<double>(plan.micro_batches));
  for (int64_t step = 0; step < plan.steps; ++step) {
    const MixtureBatch batch(step);
    optimizer.zero_grad();
    double sum = 0, balance = 0;
    for (int64_t i = 0; i < plan.micro_batches; ++i) {
      const auto own = static_cast<size_t>(i * data_ranks + data_rank);
      const auto x = batch.inputs.tensor_split(parts)[own], y = batch.targets.tensor_split(parts)[own];
      std::optional<NoSync> waits;
      if (i + 1 < plan.micro_batches && is_sharded(*model)) waits.emplace(*model);
      const auto loss = (model->forward(x) - y).square().mean() / plan.micro_batches;
      loss.backward();
      sum += loss.item<double>();
      balance += model->first->statistics().balance_loss.item<double>() / static_cast<double>(plan.micro_batches);
    }
    result.losses.push_back(sum);
    result.balance.push_back(balance);
    update_expert_bias(*model);
    result.norms.push_back(clip_grad_norm_(*model, 0.5).item<double>());
    optimizer.step();
  }
  result.weights = whole_weights(*model);
  return result;
}

/// What one process computes.
inline MixtureResult train_mixture_alone(const MoEOptions& options, const MixtureCase& plan) {
  auto model = seeded_mixture(options);
  const MixtureCase alone{.micro_batches = plan.micro_batches, .steps = plan.steps};
  return train_mixture(model, alone, 0, 1);
}

/// The meshes of a case, and the model on them.
struct SplitMixture {
  SplitMixture(Mixture& model, const MixtureCase& plan, const FullyShardOptions& options = {})
      : all(init_device_mesh(torch::kCPU, {plan.replicas, plan.shards, plan.tensor}, {"replicate", "shard", "tp"})),
        experts(expert_mesh(all[{"shard", "tp"}], plan.experts)) {
    model->recomputes = plan.recomputes;
    const auto tensor_parallel = plan.tensor > 1 ? all["tp"] : DeviceMesh();
    expert_parallel(*model, experts["ep"], {.tokens = all, .tensor_parallel = tensor_parallel});
    if (plan.tensor > 1) parallelize(*model, all["tp"], lines_of(model, plan));
    const bool is_hybrid = plan.replicas > 1;
    const auto dense = is_hybrid ? all[{"replicate", "shard"}] : all["shard"];
    const auto same = is_hybrid ? DeviceMesh::concatenate({all["replicate"], experts["efsdp"]}) : experts["efsdp"];
    for (auto* layer : moe_layers(*model)) fully_shard(*layer->experts(), same, options);
    fully_shard(*model->first, dense, options);
    fully_shard(*model, dense, options);
  }
  /// The shared experts are split as other layers are.
  static ParallelPlan lines_of(Mixture& model, const MixtureCase& plan) {
    const Placement stream = plan.splits_sequences ? Placement(Shard{1}) : Placement(Replicate{});
    ParallelPlan lines{{"up", Colwise{}}, {"down", Rowwise{.output = stream}}};
    if (model->first->shared())
      lines.insert(lines.end(), {{"*.shared.up", Colwise{}}, {"*.shared.down", Rowwise{.output = stream}}});
    if (plan.splits_sequences)
      lines.insert(lines.end(), {{"stem", PrepareOutput{stream}}, {"norm", Sequence{}}, {"head", PrepareOutput{Replicate{}}}});
    return lines;
  }
  int64_t data_rank() const { return all.local_rank("replicate") * all.size(1) + all.local_rank("shard"); }

  DeviceMesh all, experts;
};

inline MixtureResult train_mixture_on_ranks(Mixture model, const MixtureCase& plan, const FullyShardOptions& options = {}) {
  const SplitMixture split(model, plan, options);
  auto result = train_mixture(model, plan, split.data_rank(), plan.data_ranks());
  const auto world = process_context().communicator(split.all.rank_list(), torch::kCPU);
  for (auto* numbers : {&result.losses, &result.balance}) { // the mean over the ranks
    const auto means = torch::tensor(*numbers, torch::kDouble);
    world->all_reduce(means, ReduceOp::kAvg, "losses").wait();
    numbers->assign(means.const_data_ptr<double>(), means.const_data_ptr<double>() + means.numel());
  }
  return result;
}

inline void expect_same_mixture(const MixtureResult& got, const MixtureResult& expected, double bound = 1e-5) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], expected.losses[i], bound) << "loss of step " << i;
    EXPECT_NEAR(got.norms[i], expected.norms[i], bound * std::max(1.0, expected.norms[i])) << "norm of step " << i;
    EXPECT_NEAR(got.balance[i], expected.balance[i], bound) << "balance loss of step " << i;
  }
  for (const auto& [name, weights] : got.weights) EXPECT_TENSORS_CLOSE(weights, expected.weights.at(name), bound, bound) << name;
}

} // namespace tessera::testing
