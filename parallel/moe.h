#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/experts.h>

namespace tessera {

namespace internal::experts {
class TokenRows;
}

/// What an expert computes of x.
enum class ExpertKind {
  kSwiGLU, ///< down(silu(gate(x)) · up(x))
  kGelu,   ///< down(gelu(up(x)))
};

/// How the experts of a layer are kept, and saved.
enum class ExpertStorage {
  kStacked, ///< each weight of all experts as one parameter, [experts, out, in]: "experts.up"
  kModules, ///< each expert by itself: "experts.3.up.weight"
};

/// The tokens over which the auxiliary loss balances.
enum class BalanceScope {
  kAllRanks, ///< those of all ranks, as one (arXiv:2501.11873); it takes an all-reduce of [experts] numbers a forward
  kRank,     ///< those of each rank, or of the ranks of tensor parallelism: other numbers on other numbers of ranks
  kSequence, ///< those of each sequence, x being [rows, time, width]; of all ranks that have parts of it as a DTensor
};

/// A loss of routers that is injected into the backward of a layer.
struct RouterLosses {
  double balance = 0; ///< coefficient of the load-balancing loss; 0: none
  BalanceScope scope = BalanceScope::kAllRanks;
  double z = 0; ///< coefficient of the z-loss
};

struct MoEOptions {
  int64_t width = 0;         ///< of a token
  int64_t hidden = 0;        ///< features inside an expert
  int64_t experts = 0;       ///< of all ranks
  int64_t shared_hidden = 0; ///< features inside an expert that takes every token, beside the others; 0: there is none
  ExpertKind kind = ExpertKind::kSwiGLU;
  ExpertStorage storage = ExpertStorage::kStacked;
  RouteOptions route;
  std::optional<Capacity> capacity; ///< unset: every token reaches its experts
  RouterLosses losses;
  /// The step of the bias by which the router balances without a loss (arXiv:2408.15664), see `update_expert_bias`; 0: no bias.
  double bias_rate = 0;
};

/// down(silu(gate(x)) · up(x)), or down(gelu(up(x))).
class FeedForwardImpl : public torch::nn::Module {
 public:
  FeedForwardImpl(int64_t width, int64_t hidden, ExpertKind kind = ExpertKind::kSwiGLU);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear gate{nullptr}; ///< empty for kGelu
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(FeedForward);

/// Several such experts, whose weights are stacked.
class StackedExpertsImpl : public torch::nn::Module {
 public:
  StackedExpertsImpl(int64_t experts, int64_t width, int64_t hidden, ExpertKind kind = ExpertKind::kSwiGLU);
  /// Of `tokens` [received, width], the first counts[0] of which go to this rank's first expert.
  at::Tensor forward(const at::Tensor& tokens, const std::vector<int64_t>& counts);

  at::Tensor gate, up, down; ///< [experts, hidden, width], twice, and [experts, width, hidden]; `gate` is undefined for kGelu
};
TORCH_MODULE(StackedExperts);

/// The logits of experts, and the bias that balances them.
class RouterImpl : public torch::nn::Module {
 public:
  RouterImpl(int64_t width, int64_t experts, bool has_bias);
  /// [tokens…, experts], in fp32 or fp64.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight; ///< [experts, width]
  at::Tensor bias;   ///< [experts], a buffer; undefined without one
};
TORCH_MODULE(Router);

/// What a layer did in its last forward, on this rank.
struct MoEStatistics {
  at::Tensor counts;               ///< [experts], int64: the choices of this rank's tokens, those that were dropped too
  int64_t dropped = 0;             ///< choices
  at::Tensor balance_loss, z_loss; ///< with their coefficients; undefined without. The mean over the ranks is that of all
};

/// A mixture of experts: a router sends each token to its best experts, whose outputs are added with the router's weights.
///
/// Under `expert_parallel` the experts lie on several ranks, and every rank of the mesh calls forward and backward alike, one
/// without tokens too. A balancing loss or bias and a capacity are of the tokens of all ranks that it names: where `fully_shard`
/// or `replicate` took the layer without it, they are errors; `expert_parallel(*model, expert_mesh(mesh, 1)["ep"], {.tokens =
/// mesh})` splits nothing, and `fully_shard` takes the experts first. Under `parallelize` the input is a DTensor of the ranks of
/// tensor parallelism, and so is the output; each rank takes its part of the tokens to the experts. In `recompute` the second run
/// keeps the choice of the first.
class MoEImpl : public torch::nn::Module {
 public:
  /// Draws a seed from LibTorch's generator, which all ranks have seeded alike. Initial weights depend on it, and those of an
  /// expert on its number, not on the ranks. Errors for sizes that are not positive, and what `route` refuses.
  explicit MoEImpl(const MoEOptions& options);
  /// x [..., width], to the same shape.
  at::Tensor forward(const at::Tensor& x);
  /// Draws the weights anew, each expert's by its number: also where they are sharded. For `materialize`, in its `init`.
  void reset_parameters();

  const MoEOptions& options() const { return options_; }
  RouterImpl& router() { return *router_; }
  /// A StackedExperts or a torch::nn::ModuleList, for `fully_shard`.
  const std::shared_ptr<torch::nn::Module>& experts() const { return experts_; }
  /// Null without a shared expert.
  const FeedForward& shared() const { return shared_; }
  const MoEStatistics& statistics() const { return statistics_; }

  /// What the gradients of the injected losses are multiplied by, from the next forward on: 1 for a loss that is averaged over
  /// the ranks, 1/m in each of m micro-batches, times the scale of a GradScaler, divided by the number of data ranks where losses
  /// are added instead.
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  /// Forgets the choices since the last `update_expert_bias`: of a step that was given up. A `Pipeline` does so after an
  /// exception.
  void drop_choices() { chosen_ = at::Tensor(); }

 private:
  friend void expert_parallel(torch::nn::Module& module, const DeviceMesh& mesh, const ExpertParallelOptions& options);
  friend void update_expert_bias(torch::nn::Module& module);

  at::Tensor injected(const at::Tensor& output, const internal::experts::TokenRows& tokens, const Routing& routing);
  at::Tensor run_experts(const at::Tensor& tokens, const std::vector<int64_t>& counts);
  void note(const Routing& routing);
  DeviceMesh token_ranks() const;
  void check_knows_ranks(const char* what) const;
  void check_trains_together() const;

  MoEOptions options_;
  Router router_{nullptr};
  std::shared_ptr<torch::nn::Module> experts_;
  FeedForward shared_{nullptr};
  DeviceMesh mesh_; ///< over which the experts are split
  ExpertParallelOptions ranks_;
  MoEStatistics statistics_;
  at::Tensor chosen_; ///< [experts]: the choices since the last update of the bias
  double loss_scale_ = 1;
  uint64_t seed_;
};
TORCH_MODULE(MoE);

/// The MoE layers in `module`, in the order of its modules.
std::vector<MoEImpl*> moe_layers(torch::nn::Module& module);

/// `set_loss_scale` of all MoE layers in `module`. A `Trainer` calls it in each step, for its micro-batches and its scaler.
void set_router_loss_scale(torch::nn::Module& module, double scale);

/// Adds bias_rate · sign(mean - count) to the bias of each expert, less the mean of all that is added: the count of its tokens
/// over all ranks since the last call, in training, each forward once however often `recompute` runs it. Call it once a step,
/// after the last backward and before the optimizer's step. Every rank that has tokens calls it; one all-reduce for all layers of
/// a mesh.
void update_expert_bias(torch::nn::Module& module);

} // namespace tessera
