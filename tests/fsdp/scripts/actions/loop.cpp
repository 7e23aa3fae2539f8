// What a training loop has beside the model: metrics, and ranks with different numbers of batches.
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/training/metrics.h>
#include <tessera/training/uneven_batches.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// Rows of random numbers, of which the ranks have different numbers, or none.
void take_running_means(Turn& turn) {
  constexpr int64_t kClasses = 4;
  RunningMeans means({"accuracy", "top 2", "value", "nothing"});
  const int64_t batches = 1 + turn.draw.below(3);
  const auto& context = process_context();
  for (int64_t i = 0; i < batches; ++i) {
    std::vector<int64_t> rows;
    for (int rank = 0; rank < context.world_size(); ++rank) rows.push_back(turn.draw.below(5));
    const auto all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    auto generator = at::detail::createCPUGenerator(turn.draw.seed());
    const auto scores = turn.side.part(torch::randn({all, kClasses}, generator), rows);
    const auto targets = turn.side.part(torch::randint(-1, kClasses, {all}, generator, torch::kLong), rows);
    means.add_accuracy("accuracy", scores, targets, /*k=*/1, /*ignored=*/-1);
    means.add_accuracy("top 2", scores, targets.clamp_min(0), /*k=*/2);
    if (scores.size(0) > 0) means.add("value", scores.mean().item<double>(), static_cast<double>(scores.size(0)));
  }
  const auto mesh = init_device_mesh(test_device_type(), {context.world_size()});
  const auto values = turn.side.sharded ? means.means(mesh) : means.means();
  const auto counts = turn.side.sharded ? means.counts(mesh) : means.counts();
  for (const auto& [name, value] : values) turn.side.recorded.push_back({std::isnan(value) ? -1 : value, false});
  for (const auto& [name, count] : counts) turn.side.recorded.push_back({count, false});
}

/// The model's loss on batches of the program's evaluation, as a metric.
void take_mean_loss(Turn& turn) {
  const torch::NoGradGuard no_grad;
  RunningMeans means({"loss"});
  const int64_t batches = 1 + turn.draw.below(2);
  for (int64_t i = 0; i < batches; ++i) means.add("loss", random_loss(turn).item<double>());
  const auto mesh = init_device_mesh(test_device_type(), {process_context().world_size()});
  const auto mean = (turn.side.sharded ? means.means(mesh) : means.means()).at("loss");
  turn.side.recorded.push_back({mean, false, turn.side.rounding_in_evaluation});
}

RankBatch on_device(const RankBatch& batch, c10::Device device) { return {batch.x.to(device), batch.ids.to(device)}; }

std::vector<std::vector<RankBatch>> random_uneven_batches(Draw& draw) {
  std::vector<std::vector<RankBatch>> of_ranks(static_cast<size_t>(process_context().world_size()));
  for (auto& batches : of_ranks) {
    for (int64_t left = draw.below(4); left > 0; --left) {
      auto generator = at::detail::createCPUGenerator(draw.seed());
      const int64_t rows = 2 + draw.below(2);
      batches.push_back(
          {torch::randn({rows, kWidth}, generator), torch::randint(0, kVocabulary, {rows, kIdsPerRow}, generator, torch::kLong)});
    }
  }
  return of_ranks;
}

void step_on(Turn& turn, const Tensor& loss) {
  turn.trainee.optimizer->zero_grad();
  backward(loss);
  turn.trainee.optimizer->step();
}

bool has_statistics(const RandomModel& model) {
  const auto names = model.named_buffers().keys();
  return std::any_of(names.begin(), names.end(), [](auto& name) { return name.find("running_") != std::string::npos; });
}

/// Ranks that are out run on other rows, which a synchronized BatchNorm would count.
void train_on_uneven_batches(Turn& turn) {
  auto of_ranks = random_uneven_batches(turn.draw);
  auto held_out = random_uneven_batches(turn.draw);
  const bool evaluates = turn.draw.chance(40);
  const auto divisor = turn.draw.chance(40) ? UnevenDivisor::kRanksWithInput : UnevenDivisor::kAllRanks;
  const auto stand_in = RankBatch{torch::full({2, kWidth}, 0.5), torch::zeros({2, kIdsPerRow}, torch::kLong)};
  auto& model = *turn.trainee.model;
  const auto& context = process_context();
  if (has_statistics(model) || turn.trainee.ignores || turn.trainee.policy) return;
  if (turn.side.sharded) {
    auto& mine = of_ranks[static_cast<size_t>(context.rank())];
    for (auto& batch : mine) batch = on_device(batch, turn.side.device());
    UnevenBatches batches(model, mine, {.divisor = divisor, .stand_in = on_device(stand_in, turn.side.device())});
    for (const auto& batch : batches) {
      if (evaluates) { // the loop inside leaves the outer one's weights
        for ([[maybe_unused]] const auto& each :
             UnevenBatches(model, held_out[static_cast<size_t>(context.rank())], {.stand_in = stand_in})) {
        }
      }
      const auto loss = losses_of(model, {batch})[0];
      turn.side.record_mean(batches.has_input() ? loss : torch::zeros({}));
      step_on(turn, loss);
    }
    return;
  }
  const auto longest = std::max_element(of_ranks.begin(), of_ranks.end(), [](auto& a, auto& b) { return a.size() < b.size(); });
  for (size_t round = 0; round < longest->size(); ++round) {
    std::vector<RankBatch> batches;
    for (const auto& each : of_ranks) {
      if (round < each.size()) batches.push_back(each[round]);
    }
    auto sum = torch::zeros({});
    for (const auto& loss : losses_of(model, batches)) sum = sum + loss;
    turn.side.record_mean(sum / context.world_size());
    step_on(turn, sum / (divisor == UnevenDivisor::kAllRanks ? context.world_size() : static_cast<double>(batches.size())));
  }
}

} // namespace

std::vector<Action> loop_actions() {
  return {{"running means", 3, When::kAnywhere, take_running_means},
          {"mean loss", 3, When::kAnywhere, take_mean_loss},
          {"train on uneven batches", 5, When::kReduced, train_on_uneven_batches}};
}

} // namespace tessera::testing::scripts
