// Models whose layers are split over ranks, and their sequences, beside others that all ranks have whole.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/split_sequence.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/compare.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/parallel/parallel_meshes.h>
#include <tessera/tests/parallel/random_net.h>

namespace tessera::testing::scripts {

/// A model in training: whole, or split over the ranks in a way that may change from one process to the next.
class ParallelTraining {
 public:
  ParallelTraining(bool is_split, Draw& draw)
      : is_split_(is_split),
        seed_(draw.seed()),
        drawn_(seed_, /*splits_sequences=*/true),
        optimizer_plan_(draw),
        dtype_(draw_dtype(draw)) {
    make(draw);
  }

  /// Another model of the same kind, or that of a new process: on another mesh, under another plan.
  void make(Draw& draw) {
    const auto shape = draw.of(mesh_factorings());
    Draw dice(draw.seed());
    scheme_ = dice.of(std::vector{ContextParallel::kAllGather, ContextParallel::kRing});
    order_ = dice.chance(50) ? PartOrder::kHeadTail : PartOrder::kContiguous;
    const bool recomputes = dice.chance(30);
    if (is_split_) {
      meshes_.emplace(shape);
      net_ = random_net::make_net(drawn_, seed_);
      description_ = c10::str(shape, ' ', to_string(scheme_), recomputes ? ", recomputed" : "");
      split(dice);
      net_->recomputes = recomputes;
    } else if (!net_) {
      net_ = random_net::make_net(drawn_, seed_);
      net_->recomputes = false;
    }
    if (is_split_ || !optimizer_) optimizer_ = make_optimizer();
  }

  /// This rank's loss of 12 rows, of which the sum over the ranks of data and sequences is that of the whole.
  Tensor loss(uint64_t seed) {
    auto generator = at::detail::createCPUGenerator(seed);
    const auto tokens = torch::randint(0, random_net::kVocabulary, {kRows, drawn_.time}, generator, torch::kLong);
    auto targets = torch::randint(0, random_net::kVocabulary, {kRows, drawn_.time}, generator, torch::kLong);
    if (drawn_.ignores) targets.slice(0, 0, kRows / 2).slice(1, 0, 1).fill_(kIgnored); // fewer on some ranks
    const auto count = targets.ne(kIgnored).sum().item<double>();
    if (!is_split_) return sum_of(net_->forward(tokens), targets) / count;
    const auto mine = [&](const Tensor& rows) { return rows.chunk(meshes_->data_ranks())[meshes_->data_rank()].contiguous(); };
    const auto parts =
        split_sequence({mine(tokens), mine(targets)}, {1, 1}, meshes_->all["cp"], {.order = order_, .pad_values = {0, kIgnored}});
    const ContextParallelScope scope(scheme_, parts.mesh);
    return sum_of(net_->forward(parts.tensors[0].local()), parts.tensors[1].local()) / count;
  }

  /// The ranks' mean of what is recorded is the sum over those of data and sequences.
  void record_loss(Side& side, const Tensor& loss) const {
    const auto value = loss.detach().item<double>(); // also where it is a sum over the ranks of tp
    const auto ranks = meshes_ ? meshes_->data_ranks() * meshes_->all.size(2) : 1;
    side.recorded.push_back({value * static_cast<double>(ranks), true, rounding()});
  }

  void record(Side& side) {
    const auto record_one = [&](const Tensor& tensor, const std::string& what) {
      side.record(tensor);
      side.recorded.back().rounding = rounding();
      side.recorded.back().what = ", the sum of " + what + ',';
    };
    for (const auto& item : net_->named_parameters()) {
      const auto& gradient = item.value().grad();
      const auto spread = gradient.defined() ? spread_of(whole(gradient)) : 0;
      auto& largest = spreads_[item.key()];
      largest = std::max(largest, spread);
      record_one(item.value(), "the parameter " + item.key());
      side.recorded.back().rounding *= std::max(1.0, kSteps * largest); // it keeps what its gradients had
      if (!gradient.defined()) continue;
      record_one(gradient, "the gradient of " + item.key());
      side.recorded.back().rounding *= std::max(1.0, spread);
    }
  }

  /// Of a random parameter: whether it trains. The table does always.
  void freeze_or_not(Draw& draw) {
    const auto parameters = net_->parameters();
    const auto& chosen = parameters[static_cast<size_t>(draw.below(static_cast<int64_t>(parameters.size())))];
    if (!chosen.is_same(net_->table->weight)) chosen.requires_grad_(!chosen.requires_grad());
  }

  StateDict state() { return state_dict(*net_, *optimizer_, {.flatten_optimizer_state_dict = true}); }
  random_net::NetImpl& model() { return *net_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  std::string description() const {
    return description_ + (dtype_ ? c10::str(", in ", *dtype_, ", ") : ", ") + optimizer_plan_.name();
  }
  double rounding() const { return !dtype_ ? 0 : dtype_ == torch::kFloat ? 5e-3 : 16 * 0x1p-8; }

 private:
  static constexpr int64_t kRows = 12, kIgnored = -100;
  static constexpr double kRate = 0.05, kMomentum = 0.9;
  static constexpr double kSteps = kRate / (1 - kMomentum); ///< of a gradient, with all that its momentum adds

  /// By how much more the sum of a gradient is rounded than one number near 1: each of its numbers was rounded beside the largest
  /// one before they were added.
  static double spread_of(const Tensor& gradient) {
    return gradient.abs().max().item<double>() * std::sqrt(static_cast<double>(gradient.numel()));
  }

  static std::optional<torch::Dtype> draw_dtype(Draw& draw) {
    const auto number = draw.below(100);
    if (number >= 35) return std::nullopt;
    return number < 20 ? torch::kFloat : torch::kBFloat16;
  }

  void split(Draw& dice) {
    const auto plan = random_net::draw_plan(drawn_, meshes_->all.size(3), dice);
    const auto overlap = random_net::draw_overlap(dice);
    parallelize(*net_, meshes_->all["tp"], plan, {.overlap = overlap});
    if (overlap.when != Overlap::kNever) description_ += c10::str(", overlapped in ", overlap.chunks);
    description_ += "\n" + to_string(plan);
    const auto& mesh = meshes_->parameters;
    FullyShardOptions options;
    options.layout = dice.chance(50) ? BufferLayout::kRagged : BufferLayout::kPerParameter;
    if (dice.chance(30)) options.reshard_after_forward = false;
    if (dice.chance(40) && mesh.ndim() == 1)
      options.strategy = dice.of(std::vector{tessera::Strategy::kNoShard, tessera::Strategy::kZero1, tessera::Strategy::kZero2});
    if (options.strategy && options.strategy != tessera::Strategy::kFullShard) options.reshard_after_forward = {};
    if (dtype_) options.mixed_precision = {.param_dtype = *dtype_, .reduce_dtype = torch::kDouble};
    random_net::shard_at_random(net_, mesh, options, dice, [](FSDPModule handle) { handle.set_gradient_divide_factor(1); });
  }

  /// Adam makes steps of what is rounding alone.
  std::unique_ptr<torch::optim::Optimizer> make_optimizer() const {
    if (!dtype_) return optimizer_plan_.make(*net_);
    return std::make_unique<torch::optim::SGD>(net_->parameters(), torch::optim::SGDOptions(kRate).momentum(kMomentum));
  }

  Tensor sum_of(const Tensor& logits, const Tensor& targets) const {
    const auto exact = dtype_ == torch::kBFloat16 ? logits.to(torch::kDouble) : logits; // the sum of all has more digits
    return torch::cross_entropy_loss(exact.flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum, kIgnored, drawn_.smoothing);
  }

  bool is_split_;
  uint64_t seed_;
  random_net::Drawn drawn_;
  OptimizerPlan optimizer_plan_;
  std::optional<torch::Dtype> dtype_; ///< in which the split side computes; none: double
  std::optional<ParallelMeshes> meshes_;
  ContextParallel scheme_ = ContextParallel::kAllGather;
  PartOrder order_ = PartOrder::kHeadTail;
  random_net::Net net_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::string description_;
  std::map<std::string, double> spreads_; ///< the largest of each parameter's gradients so far
};

namespace {

ParallelTraining& training_of(Turn& turn) {
  Draw draw(turn.draw.seed());
  if (!turn.side.parallel) turn.side.parallel = std::make_shared<ParallelTraining>(turn.side.sharded, draw);
  turn.note(turn.side.parallel->description());
  return *turn.side.parallel;
}

/// One backward a forward, of which all but the last may keep their gradients.
void accumulate(Turn& turn, ParallelTraining& training, int64_t batches) {
  for (int64_t i = 0; i < batches; ++i) {
    const bool waits = turn.draw.chance(40) && i + 1 < batches;
    std::optional<NoSync> scope;
    if (waits && turn.side.sharded) scope.emplace(training.model());
    const auto loss = training.loss(turn.draw.seed());
    training.record_loss(turn.side, loss);
    interrupt(turn);
    backward(loss);
  }
}

/// All forwards, and then one backward of their sum.
void sum_up(Turn& turn, ParallelTraining& training, int64_t batches) {
  Tensor sum;
  for (int64_t i = 0; i < batches; ++i) {
    const auto loss = training.loss(turn.draw.seed());
    training.record_loss(turn.side, loss);
    sum = sum.defined() ? sum + loss : loss;
  }
  interrupt(turn);
  backward(sum);
}

void train_in_parallel(Turn& turn) {
  auto& training = training_of(turn);
  const int64_t batches = 1 + turn.draw.below(3);
  const bool clips = turn.draw.chance(50), steps = turn.draw.chance(80), sums = turn.draw.chance(35);
  training.optimizer().zero_grad(turn.draw.chance(60));
  if (turn.draw.chance(25)) training.freeze_or_not(turn.draw);
  turn.note(c10::str(batches, " batches", sums ? " in one backward" : "", clips ? ", clipped" : "", steps ? ", step" : ""));
  train_or_give_up(training.model(), [&] { sums ? sum_up(turn, training, batches) : accumulate(turn, training, batches); });
  if (clips) {
    const bool of_torch = turn.draw.chance(50);
    const auto norm = of_torch ? torch::nn::utils::clip_grad_norm_(training.model().parameters(), 0.3)
                               : clip_grad_norm_(training.model(), 0.3).item<double>();
    turn.side.recorded.push_back({norm, false, training.rounding()});
  }
  if (steps) training.optimizer().step();
  training.record(turn.side);
}

void evaluate_in_parallel(Turn& turn) {
  const auto seed = turn.draw.seed();
  const bool in_inference_mode = turn.draw.chance(40);
  if (!turn.side.parallel) return;
  const torch::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> inference;
  if (in_inference_mode) inference.emplace();
  const auto loss = turn.side.parallel->loss(seed);
  turn.side.parallel->record_loss(turn.side, loss);
}

/// A new process on another mesh. The whole model goes on with what it has.
void save_and_load_in_parallel(Turn& turn) {
  auto& training = training_of(turn);
  Draw draw(turn.draw.seed());
  const auto folder = turn.side.folder / ("p-" + std::to_string(turn.draw.seed()));
  training.model().zero_grad();
  std::vector<bool> trains;
  for (const auto& parameter : training.model().parameters()) trains.push_back(parameter.requires_grad());
  if (turn.side.sharded) {
    checkpoint::save(training.state(), folder, {.update_latest = false});
    training.make(draw);
    checkpoint::load(training.state(), folder);
    const auto parameters = training.model().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].requires_grad_(trains[i]);
    turn.note("then " + training.description());
  }
  training.record(turn.side);
}

} // namespace

std::vector<Action> parallel_actions() {
  return {{"train in parallel", 6, When::kBetweenSteps, train_in_parallel},
          {"evaluate in parallel", 3, When::kBetweenSteps, evaluate_in_parallel},
          {"save and load in parallel", 2, When::kBetweenSteps, save_and_load_in_parallel}};
}

} // namespace tessera::testing::scripts
