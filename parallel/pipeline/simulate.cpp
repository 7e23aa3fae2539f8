#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <tessera/parallel/pipeline/dependencies.h>

namespace tessera {

namespace {

using internal::pipeline::needs_of, internal::pipeline::part_of;
using internal::pipeline::Part;
using Span = PipelineSimulation::Span;

double cost_of(const PipelineAction& action, const PipelineCosts& costs) {
  const double factor = costs.stage_factors.empty() ? 1 : costs.stage_factors[static_cast<size_t>(action.stage)];
  switch (action.work) {
    case PipelineWork::kForward: return factor * costs.forward;
    case PipelineWork::kBackward: return factor * (costs.input_gradients + costs.weight_gradients);
    case PipelineWork::kInputGradients: return factor * costs.input_gradients;
    case PipelineWork::kWeightGradients: return factor * costs.weight_gradients;
    case PipelineWork::kUnshard:
    case PipelineWork::kReshard: return 0;
  }
  return 0;
}

/// It tells when each rank does what.
class Clock {
 public:
  Clock(const PipelineSchedule& schedule, const PipelineCosts& costs, PipelineSimulation& simulation)
      : schedule_(schedule), costs_(costs), ranks_(simulation.ranks), now_(schedule.actions.size(), 0) {}

  /// Actions [begin, end) of a rank, which overlap: they begin together, and each ends when all do.
  void perform(size_t rank, size_t begin, size_t end) {
    double start = now_[rank], whole = 0, longest = 0;
    for (auto at = begin; at < end; ++at) {
      const auto& action = schedule_.actions[rank][at];
      for (const auto& part : needs_of(action, schedule_.stages())) start = std::max(start, arrival(part, rank));
      whole += cost_of(action, costs_);
      longest = std::max(longest, cost_of(action, costs_));
    }
    const double stop = start + whole - costs_.overlap * (whole - longest);
    for (auto at = begin; at < end; ++at) {
      const auto& action = schedule_.actions[rank][at];
      ranks_[rank].spans.push_back({action, start, stop});
      if (const auto part = part_of(action)) ends_[*part] = stop;
    }
    ranks_[rank].busy += stop - start;
    now_[rank] = stop;
  }

  double last() const { return *std::max_element(now_.begin(), now_.end()); }

 private:
  double arrival(const Part& part, size_t rank) const {
    const bool is_sent = schedule_.rank_of_stage[static_cast<size_t>(part.stage)] != static_cast<int64_t>(rank);
    return ends_.at(part) + (is_sent ? costs_.message : 0);
  }

  const PipelineSchedule& schedule_;
  const PipelineCosts& costs_;
  std::vector<PipelineSimulation::Rank>& ranks_;
  std::vector<double> now_;     ///< by rank
  std::map<Part, double> ends_; ///< when it was made
};

/// What a rank keeps, by the order of its actions alone.
void count_memory(const std::vector<PipelineAction>& actions, PipelineSimulation::Rank& rank) {
  int64_t live = 0;
  std::set<int64_t> gathered, stages;
  for (const auto& action : actions) {
    stages.insert(action.stage);
    switch (action.work) {
      case PipelineWork::kForward: rank.live_forwards = std::max(rank.live_forwards, ++live); break;
      case PipelineWork::kBackward:
      case PipelineWork::kWeightGradients: --live; break;
      case PipelineWork::kInputGradients: break;
      case PipelineWork::kUnshard:
        gathered.insert(action.stage);
        ++rank.gathers;
        break;
      case PipelineWork::kReshard: gathered.erase(action.stage); break;
    }
    rank.resident_stages = std::max(rank.resident_stages, static_cast<int64_t>(gathered.size()));
  }
  if (rank.gathers == 0) rank.resident_stages = static_cast<int64_t>(stages.size());
}

void check_costs(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  for (const double cost : {costs.forward, costs.input_gradients, costs.weight_gradients, costs.message})
    TORCH_CHECK(cost >= 0 && std::isfinite(cost), "a cost of a pipeline's work is ", cost);
  for (const double factor : costs.stage_factors)
    TORCH_CHECK(factor >= 0 && std::isfinite(factor), "a factor of a pipeline's stage is ", factor);
  TORCH_CHECK(costs.overlap >= 0 && costs.overlap <= 1,
              "the overlap of a pipeline's actions is a share of 0 to 1, and was given ", costs.overlap);
  TORCH_CHECK(costs.stage_factors.empty() || std::ssize(costs.stage_factors) == schedule.stages(), "there are ",
              costs.stage_factors.size(), " stage_factors for ", schedule.stages(), " stages");
}

} // namespace

double PipelineSimulation::idle_share() const {
  double busy = 0;
  for (const auto& rank : ranks) busy += rank.busy;
  const double all = makespan * static_cast<double>(ranks.size());
  return all > 0 ? 1 - busy / all : 0;
}

PipelineSimulation simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  check_schedule(schedule);
  check_costs(schedule, costs);
  PipelineSimulation simulation;
  simulation.ranks.resize(schedule.actions.size());
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) count_memory(schedule.actions[rank], simulation.ranks[rank]);
  Clock clock(schedule, costs, simulation);
  internal::pipeline::Progress(schedule).run([&](size_t rank, size_t begin, size_t end) { clock.perform(rank, begin, end); });
  simulation.makespan = clock.last();
  return simulation;
}

} // namespace tessera
