// Averages of the weights.
#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/training/averaged_model.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

#include <algorithm>
#include <optional>
#include <string>

namespace tessera::testing::scripts {
namespace {

/// The average of the trainee, a new one where it has none.
AveragedModel& average_of(Turn& turn) {
  auto& trainee = turn.trainee;
  const auto share = turn.draw.of(std::vector<AverageShare>{ema(0.7, EmaWarmup{}), ema(0.6), swa(), swa()});
  AverageOptions options{.use_buffers = turn.draw.chance(50)};
  if (turn.draw.chance(20)) options.dtype = torch::kDouble;
  if (!trainee.average) {
    trainee.make_average = [share, options](const RandomModel& model) {
      return std::make_unique<AveragedModel>(model, share, options);
    };
    trainee.average = trainee.make_average(*trainee.model);
  }
  return *trainee.average;
}

void update_average(Turn& turn) {
  auto& average = average_of(turn);
  const bool without_grad = turn.draw.chance(50);
  {
    std::optional<torch::NoGradGuard> no_grad;
    if (without_grad) no_grad.emplace();
    average.update_parameters(*turn.trainee.model);
  }
  const auto state = state_dict(average);
  for (const auto& entry : state.entries()) {
    // What is computed in bfloat16 is too coarse to compare.
    if (entry.is_tensor() && state.tensor(entry.name).scalar_type() != torch::kBFloat16)
      turn.side.record(state.tensor(entry.name));
  }
}

void evaluate_average(Turn& turn) {
  if (internal::in_backward()) return; // autograd refuses weights that were exchanged amid a backward; shards may be
  auto& average = average_of(turn);
  const AveragedWeights averaged(average, *turn.trainee.model);
  const torch::NoGradGuard no_grad;
  turn.side.record_mean(random_loss(turn));
}

/// Two averages hold the model, one within the other, and end in any order.
void evaluate_two_averages(Turn& turn) {
  auto& average = average_of(turn);
  const bool first_ends_first = turn.draw.chance(50), same = turn.draw.chance(30);
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    turn.side.record_mean(random_loss(turn));
  };
  const AveragedModel now(*turn.trainee.model, swa(), {.use_buffers = true, .name = "now"});
  auto first = std::make_unique<AveragedWeights>(average, *turn.trainee.model);
  auto second = std::make_unique<AveragedWeights>(same ? average : now, *turn.trainee.model);
  evaluate();
  (first_ends_first ? first : second).reset();
  evaluate();
  if (turn.draw.chance(50)) interrupt(turn);
}

/// It may hold running statistics, which a BatchNorm's backward needs as they were (see write_buffers).
void take_average(Turn& turn) {
  auto& average = average_of(turn);
  const auto buffers = turn.trainee.model->named_buffers();
  const bool has_statistics = std::any_of(buffers.begin(), buffers.end(),
                                          [](const auto& item) { return item.key().find("running_") != std::string::npos; });
  if (turn.depth == 0 || !has_statistics) average.copy_to(*turn.trainee.model);
}

} // namespace

std::vector<Action> average_actions() {
  return {{"update the average", 6, When::kAnywhere, update_average},
          {"evaluate the average", 4, When::kAnywhere, evaluate_average},
          {"evaluate two averages", 3, When::kAnywhere, evaluate_two_averages},
          {"take the average", 1, When::kAnywhere, take_average}};
}

} // namespace tessera::testing::scripts
