#include "pass.h"

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/fully_shard.h>

#include <algorithm>

#include <tessera/tests/fsdp/scripts/block_runs.h>
#include <tessera/tests/support/autocast.h>

namespace tessera::testing::scripts {
namespace {

constexpr int64_t kRows = 12; ///< divides by 1 to 4 ranks

struct Batch {
  Tensor x, ids;
};

std::vector<int64_t> even_rows() {
  const int64_t ranks = process_context().world_size();
  return std::vector<int64_t>(static_cast<size_t>(ranks), kRows / ranks);
}

/// Of which each rank has at least two: LibTorch's BatchNorm refuses one.
std::vector<int64_t> random_rows(Draw& draw) {
  std::vector<int64_t> rows(static_cast<size_t>(process_context().world_size()), 2);
  const auto ranks = static_cast<int64_t>(rows.size());
  for (int64_t left = kRows - 2 * ranks; left > 0; --left) ++rows[static_cast<size_t>(draw.below(ranks))];
  return rows;
}

/// What the mean over the rows of `rank` counts, so that the ranks' mean is that over the batch.
double weight_of_rows(const std::vector<int64_t>& rows_of_ranks, std::optional<int64_t> rank) {
  const auto ranks = static_cast<int64_t>(rows_of_ranks.size());
  return rank ? static_cast<double>(rows_of_ranks[static_cast<size_t>(*rank)] * ranks) / kRows : 1;
}

Batch random_batch(const Side& side, uint64_t seed, const std::vector<int64_t>& rows_of_ranks, std::optional<int64_t> rank) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto x = torch::randn({kRows, kWidth}, generator);
  const auto ids = torch::randint(0, kVocabulary, {kRows, kIdsPerRow}, generator, torch::kLong);
  return {side.part(x, rows_of_ranks, rank), side.part(ids, rows_of_ranks, rank)};
}

/// `loss_of(rank)` of this side's rows. An unsharded side that emulates a policy computes as each rank does, and takes the mean;
/// any other has the rows of all ranks.
template <typename LossOf>
Tensor loss_of_side(const Side& side, Trainee& trainee, const LossOf& loss_of) {
  if (side.sharded) return loss_of(std::optional<int64_t>(process_context().rank())).to(torch::kDouble);
  if (!trainee.emulation) return loss_of(std::optional<int64_t>());
  std::vector<Tensor> losses;
  for (int64_t rank = 0; rank < process_context().world_size(); ++rank) {
    const EmulatedPolicy::Scope scope(*trainee.emulation, *trainee.model, rank);
    losses.push_back(loss_of(std::optional(rank)));
  }
  return EmulatedPolicy::mean(losses);
}

/// A mean over rows. Smooth: outputs may be zero but for rounding, and the slope of abs there would be that of the rounding.
Tensor loss_of_output(const Tensor& y, int64_t kind) {
  switch (kind) {
    case 0: return y.sum() / y.size(0) * 0.3;
    case 1: return torch::nn::functional::mse_loss(y, torch::tanh(y.detach()));
    case 2: return torch::logsumexp(y, 1).mean();
    case 3: return (y.square() + 0.1).sqrt().mean() + y.select(1, 0).square().mean();
    default: return y.square().mean();
  }
}

/// Of parameters alone: the same on every rank.
Tensor penalty_of_parameters(const RandomModel& model, bool all) {
  if (!all) return model.head().square().sum() * 0.01;
  auto sum = torch::zeros({});
  for (const auto& parameter : model.parameters()) {
    if (parameter.scalar_type() == torch::kDouble) sum = sum + parameter.pow(2).sum() * 0.001;
  }
  return sum;
}

/// How far the head is from half of itself, a sharded copy: among DTensors, where the head is one. Each rank has the whole.
Tensor proximal_penalty(const RandomModel& model) {
  Tensor anchor;
  {
    const torch::NoGradGuard no_grad;
    anchor = model.head().detach().clone().mul_(0.5);
  }
  const auto penalty = (model.head() - anchor).square().sum() * 0.01;
  return is_dtensor(penalty) ? DTensor(penalty).full_tensor() : penalty;
}

/// Of how fast the output changes with the input: a gradient that is differentiated again.
Tensor gradient_penalty(const Tensor& y, const Tensor& x) {
  const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true,
                                              /*allow_unused=*/true)[0];
  return gradient.defined() ? gradient.square().sum(1).mean() * 0.1 : torch::zeros({});
}

/// Only where the unsharded side computes with the same rows: the products of other numbers of rows would be rounded otherwise.
int64_t percent_in_autocast(const Trainee& trainee) {
  const bool is_half = trainee.policy && trainee.policy->param_dtype == torch::kHalf; // which autocast to bfloat16 does not join
  if (!trainee.policy || is_half || !torch::GradMode::is_enabled()) return 0;
  return trainee.policy->param_dtype == torch::kFloat ? 50 : 15;
}

/// Whether inputs and outputs are in the dtypes already that a `tessera::call` of a block would cast them to. A module of which
/// all parameters are kept in Float takes its inputs in Float, and its gradients are then added in Float too.
bool calls_change_no_number(const Trainee& trainee) {
  if (!trainee.policy) return true;
  const auto& model = *trainee.model;
  const auto names = model.named_parameters().keys();
  const bool keeps = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return name != "head" && is_kept(model, name, trainee.policy->keep_in_fp32);
  });
  return model.casts_inputs() && !keeps;
}

} // namespace

Tensor random_loss(Turn& turn, const Tap& tap, bool may_recompute, bool may_mix_dtensors) {
  ++turn.side.forwards;
  auto& model = *turn.trainee.model;
  const auto seed = turn.draw.seed();
  const auto rows = turn.draw.chance(25) ? random_rows(turn.draw) : even_rows();
  const auto order = model.random_order(turn.draw);
  const auto kind = turn.draw.below(6);
  const auto penalty = turn.draw.below(10); // 0: the head's, 1: all parameters', 2: the gradient's, 3: the head's among DTensors
  const bool in_scope = turn.draw.chance(15);
  const bool x_has_gradient = turn.draw.chance(30);
  const bool in_autocast = turn.draw.chance(percent_in_autocast(turn.trainee));
  const auto run = random_run(turn.draw, may_recompute, calls_change_no_number(turn.trainee));

  const bool trains = torch::GradMode::is_enabled();
  // What a hook within writes, and the second pass of a gradient penalty reads, is in no order. A device's threads take another.
  const bool is_ordered = !tap || test_device().is_cpu();
  const bool gradient_counts = trains && penalty == 2 && is_ordered && model.is_twice_differentiable();
  turn.note(c10::str("forward of ", order, " on rows ", rows, ", loss ", kind, ", penalty ", penalty,
                     in_scope ? ", in scope" : "", in_autocast ? ", in autocast" : "", run.name.empty() ? "" : ", blocks ",
                     run.name));
  std::optional<ForwardScope> scope;
  if (in_scope && turn.side.sharded) scope.emplace(model);
  std::optional<AutocastScope> autocast;
  if (in_autocast) autocast.emplace(turn.side.device().type());
  auto loss = loss_of_side(turn.side, turn.trainee, [&](std::optional<int64_t> rank) {
    auto [x, ids] = random_batch(turn.side, seed, rows, rank);
    if (trains && (x_has_gradient || gradient_counts)) x.requires_grad_();
    const auto weight = weight_of_rows(rows, rank);
    const auto y = model.forward(x, ids, order, tap, turn.side.sharded ? run.run : RunBlock());
    TORCH_CHECK(!is_dtensor(y), "the output is a DTensor");
    auto loss = loss_of_output(y, kind) * weight;
    if (trains && penalty < 2) loss = loss + penalty_of_parameters(model, penalty == 1);
    return gradient_counts ? loss + gradient_penalty(y, x) * weight : loss;
  });
  if (trains && penalty == 3 && may_mix_dtensors) loss = loss + proximal_penalty(model);
  return loss;
}

Tensor loss_of_ranks_apart(Turn& turn) {
  auto& model = *turn.trainee.model;
  const auto rows = even_rows();
  const auto seed = turn.draw.seed();
  std::vector<std::vector<size_t>> orders(rows.size());
  for (auto& order : orders) order = model.random_order(turn.draw);
  turn.note(c10::str("forwards of ", orders));
  const auto loss_of = [&](std::optional<int64_t> rank) {
    const auto [x, ids] = random_batch(turn.side, seed, rows, rank);
    return model.forward(x, ids, orders[static_cast<size_t>(*rank)]).square().mean();
  };
  if (turn.side.sharded || turn.trainee.emulation) return loss_of_side(turn.side, turn.trainee, loss_of);
  Tensor sum = torch::zeros({});
  for (size_t rank = 0; rank < rows.size(); ++rank) sum = sum + loss_of(static_cast<int64_t>(rank));
  return sum / static_cast<double>(rows.size());
}

std::vector<Tensor> losses_of(RandomModel& model, const std::vector<RankBatch>& batches) {
  std::vector<Tensor> x, ids;
  std::vector<int64_t> rows;
  for (const auto& batch : batches) {
    x.push_back(batch.x);
    ids.push_back(batch.ids);
    rows.push_back(batch.x.size(0));
  }
  std::vector<Tensor> losses;
  for (const auto& y : model.forward(torch::cat(x), torch::cat(ids), model.whole_order()).split_with_sizes(rows))
    losses.push_back(y.square().mean());
  return losses;
}

Tensor whole_loss(const Side& side, Trainee& trainee, uint64_t seed, Squares squares) {
  return loss_of_side(side, trainee, [&](std::optional<int64_t> rank) {
    const auto [x, ids] = random_batch(side, seed, even_rows(), rank);
    const auto y = trainee.model->forward(x, ids, trainee.model->whole_order()).square();
    return (squares == Squares::kBounded ? y / (1 + y) : y).mean();
  });
}

void backward(const Tensor& loss, bool retain_graph, const std::vector<Tensor>& inputs) {
  if (!loss.requires_grad()) return;
  EmulatedPolicy::refresh_all();
  if (inputs.empty()) {
    loss.backward({}, retain_graph);
  } else {
    loss.backward({}, retain_graph, /*create_graph=*/false, inputs);
  }
}

void set_is_last_backward(Turn& turn, bool is_last) {
  turn.trainee.is_last_backward = is_last;
  if (turn.side.sharded) fsdp(*turn.trainee.model).set_is_last_backward(is_last);
}

void train_or_give_up(torch::nn::Module& model, const std::function<void()>& train) {
  try {
    train();
  } catch (...) {
    model.zero_grad();
    if (is_sharded(model)) fsdp(model).zero_grad();
    throw;
  }
}

} // namespace tessera::testing::scripts
