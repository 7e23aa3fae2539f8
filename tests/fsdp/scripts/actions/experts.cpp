// Modules that only the ranks of one column of a mesh have, beside others that all ranks have.
#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/no_sync.h>

#include <optional>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_policy.h>

namespace tessera::testing::scripts {
namespace {

namespace nn = torch::nn;

std::string name_of(int64_t expert) { return "expert" + std::to_string(expert); }

/// The columns have an expert each.
DeviceMesh random_grid(Draw& draw) {
  const int64_t world = process_context().world_size();
  std::vector<int64_t> columns{1, world};
  if (world == 4) columns.insert(columns.end(), 2, 2);
  const auto experts = draw.of(columns);
  return init_device_mesh(test_device_type(), {world / experts, experts}, {"shard", "expert"});
}

/// On a mesh of one dim or two.
FullyShardOptions options_of(Draw& draw, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy) {
  FullyShardOptions options;
  if (mesh.ndim() == 2) {
    if (draw.chance(50)) options.strategy = tessera::Strategy::kHierarchical;
  } else if (draw.chance(50)) {
    options.strategy = draw.of(std::vector{tessera::Strategy::kZero1, tessera::Strategy::kZero2});
  }
  options.layout = draw.chance(50) ? BufferLayout::kPerParameter : BufferLayout::kRagged;
  options.mixed_precision = policy;
  return options;
}

} // namespace

/// A layer that all share, the experts in `held`, and a head.
struct Mixture : nn::Module {
  explicit Mixture(const std::vector<int64_t>& held) {
    for (const int64_t expert : held) {
      torch::manual_seed(static_cast<uint64_t>(10 + expert)); // one expert has the same weights wherever it is
      register_module(name_of(expert), nn::Sequential(nn::Linear(kWidth, 5), nn::Tanh(), nn::Linear(5, kWidth)));
    }
    torch::manual_seed(1);
    stem = register_module("stem", nn::Linear(kWidth, kWidth));
    head = register_module("head", nn::Linear(kWidth, 2));
  }
  nn::SequentialImpl& expert(int64_t number) { return *named_children()[name_of(number)]->as<nn::Sequential>(); }
  nn::Linear stem{nullptr}, head{nullptr};
};

/// The mixture in training: of all experts, or of this rank's.
class Experts {
 public:
  Experts(bool is_sharded, Draw& draw) : grid_(random_grid(draw)), plan_(draw), is_sharded_(is_sharded) {
    if (draw.chance(60)) policy_ = {.param_dtype = LowPrecision(draw).param_dtype, .reduce_dtype = torch::kDouble}; // exact
    if (!is_sharded) emulation_ = std::make_unique<EmulatedPolicy>(policy_, process_context().world_size());
    make(draw);
  }

  /// Another model of the same kind, or the sharding of a new process.
  void make(Draw& draw) {
    const bool whole_mesh = draw.chance(50);
    const auto of_expert = options_of(draw, grid_["shard"], policy_);
    const auto flat = init_device_mesh(test_device_type(), {process_context().world_size()});
    const auto& mesh = whole_mesh ? grid_ : flat;
    const auto of_rest = options_of(draw, mesh, policy_);
    if (is_sharded_) {
      const int64_t mine = column(process_context().rank());
      model_ = std::make_shared<Mixture>(std::vector<int64_t>{mine});
      auto handle = fully_shard(model_->expert(mine), grid_["shard"], of_expert);
      handle.set_gradient_divide_factor(static_cast<double>(process_context().world_size()));
      fully_shard(*model_, mesh, of_rest);
    } else if (!model_) {
      std::vector<int64_t> all;
      for (int64_t expert = 0; expert < grid_.size(1); ++expert) all.push_back(expert);
      model_ = std::make_shared<Mixture>(all);
    }
    if (is_sharded_ || !optimizer_) optimizer_ = plan_.make(*model_);
  }

  /// Of 12 rows, of which each rank has as many.
  Tensor loss(const Side& side, uint64_t seed, bool recomputes) {
    auto generator = at::detail::createCPUGenerator(seed);
    const auto batch = torch::randn({12, kWidth}, generator);
    const int64_t world = process_context().world_size();
    const std::vector<int64_t> rows(static_cast<size_t>(world), 12 / world);
    if (is_sharded_) return loss_of_rank(side.part(batch, rows), process_context().rank(), recomputes).to(torch::kDouble);
    std::vector<Tensor> losses;
    for (int64_t rank = 0; rank < world; ++rank) {
      const EmulatedPolicy::Scope scope(*emulation_, *model_, rank);
      losses.push_back(loss_of_rank(side.part(batch, rows, rank), rank, false));
    }
    return EmulatedPolicy::mean(losses);
  }

  /// Of what this rank has on the sharded side.
  void record(Side& side) {
    const int64_t mine = column(process_context().rank());
    for (const auto& tensors : {model_->expert(mine).parameters(), model_->stem->parameters(), model_->head->parameters()}) {
      for (const auto& tensor : tensors) {
        side.record(tensor);
        if (tensor.grad().defined()) side.record(tensor.grad());
      }
    }
  }

  StateDict state() { return state_dict(*model_, *optimizer_, {.flatten_optimizer_state_dict = true}); }
  Mixture& model() { return *model_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  std::string description() const {
    return c10::str(grid_.shape(), ' ', plan_.name(), policy_.param_dtype ? " in low precision" : "");
  }

 private:
  int64_t column(int64_t rank) const { return rank % grid_.size(1); }

  Tensor loss_of_rank(const Tensor& x, int64_t rank, bool recomputes) {
    const auto hidden = torch::tanh(model_->stem(x));
    auto& expert = model_->expert(column(rank));
    const auto run = [&expert](const Tensor& input) { return expert.forward(input); }; // once more in backward
    const auto y = recomputes ? recompute(run, hidden) : run(hidden);
    return model_->head(y + hidden).square().mean();
  }

  DeviceMesh grid_;
  OptimizerPlan plan_;
  bool is_sharded_;
  MixedPrecisionPolicy policy_;
  std::unique_ptr<EmulatedPolicy> emulation_;
  std::shared_ptr<Mixture> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

namespace {

Experts& experts_of(Turn& turn) {
  Draw draw(turn.draw.seed());
  if (!turn.side.experts) turn.side.experts = std::make_shared<Experts>(turn.side.sharded, draw);
  turn.note(turn.side.experts->description());
  return *turn.side.experts;
}

void accumulate(Turn& turn, Experts& experts, int64_t batches) {
  for (int64_t i = 0; i < batches; ++i) {
    const bool waits = turn.draw.chance(50) && i + 1 < batches;
    std::optional<NoSync> scope;
    if (waits && turn.side.sharded) scope.emplace(experts.model());
    const auto loss = experts.loss(turn.side, turn.draw.seed(), turn.draw.chance(30));
    turn.side.record_mean(loss);
    interrupt(turn);
    backward(loss);
  }
}

void train_experts(Turn& turn) {
  auto& experts = experts_of(turn);
  const int64_t batches = 1 + turn.draw.below(3);
  const bool clips = turn.draw.chance(50), steps = turn.draw.chance(80);
  experts.optimizer().zero_grad(turn.draw.chance(60));
  train_or_give_up(experts.model(), [&] { accumulate(turn, experts, batches); });
  if (clips) turn.side.recorded.push_back({clip_grad_norm_(experts.model(), 0.3).item<double>(), false});
  if (steps) experts.optimizer().step();
  experts.record(turn.side);
}

void evaluate_experts(Turn& turn) {
  const auto seed = turn.draw.seed();
  if (!turn.side.experts) return;
  const torch::NoGradGuard no_grad;
  turn.side.record_mean(turn.side.experts->loss(turn.side, seed, false));
}

/// A new process, whose experts are sharded in another way. The unsharded side goes on with what it has.
void save_and_load_experts(Turn& turn) {
  auto& experts = experts_of(turn);
  Draw draw(turn.draw.seed());
  const auto folder = turn.side.folder / ("e-" + std::to_string(turn.draw.seed()));
  experts.model().zero_grad();
  if (turn.side.sharded) {
    checkpoint::save(experts.state(), folder, {.update_latest = false});
    experts.make(draw);
    checkpoint::load(experts.state(), folder);
  }
  experts.record(turn.side);
}

} // namespace

std::vector<Action> expert_actions() {
  return {{"train experts", 5, When::kBetweenSteps, train_experts},
          {"evaluate experts", 2, When::kAnywhere, evaluate_experts},
          {"save and load experts", 1, When::kBetweenSteps, save_and_load_experts}};
}

} // namespace tessera::testing::scripts
