#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <tessera/parallel/pipeline/dependencies.h>

namespace tessera {

namespace {

using internal::pipeline::message_of, internal::pipeline::part_of;
using internal::pipeline::Part;
using internal::pipeline::Product;
using internal::pipeline::Progress;

std::string text_of(const Part& part) {
  return c10::str(part.product == Product::kOutputs ? "the outputs" : "the gradients of the inputs", " of micro-batch ",
                  part.micro_batch, " in stage ", part.stage);
}

/// How often each work of a stage and micro-batch is done.
class Counts {
 public:
  explicit Counts(const PipelineSchedule& schedule) : schedule_(schedule) {
    for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
      for (const auto& action : schedule.actions[rank]) {
        check_place(action, rank);
        if (internal::pipeline::computes(action.work)) ++counts_[{action.stage, action.micro_batch, action.work}];
      }
    }
  }

  void check_complete() const {
    for (int64_t stage = 0; stage < schedule_.stages(); ++stage) {
      for (int64_t at = 0; at < schedule_.micro_batches; ++at) check_once(stage, at);
    }
  }

 private:
  using Key = std::tuple<int64_t, int64_t, PipelineWork>;

  void check_place(const PipelineAction& action, size_t rank) const {
    const auto name = to_string(action);
    TORCH_CHECK(action.stage >= 0 && action.stage < schedule_.stages(), "the schedule ", schedule_.name, " has ",
                schedule_.stages(), " stages, and rank ", rank, " does ", name);
    const auto home = schedule_.rank_of_stage[static_cast<size_t>(action.stage)];
    TORCH_CHECK(home == static_cast<int64_t>(rank), "stage ", action.stage, " is on rank ", home, ", and rank ", rank, " does ",
                name);
    if (!internal::pipeline::computes(action.work)) return;
    TORCH_CHECK(action.micro_batch >= 0 && action.micro_batch < schedule_.micro_batches, "the schedule ", schedule_.name, " has ",
                schedule_.micro_batches, " micro-batches, and rank ", rank, " does ", name);
  }

  int64_t count(int64_t stage, int64_t micro_batch, PipelineWork work) const {
    const auto found = counts_.find({stage, micro_batch, work});
    return found == counts_.end() ? 0 : found->second;
  }

  void check_once(int64_t stage, int64_t at) const {
    const auto of = [&](PipelineWork work) { return count(stage, at, work); };
    const auto what = [&] { return c10::str(" of micro-batch ", at, " in stage ", stage, " of the schedule ", schedule_.name); };
    TORCH_CHECK(of(PipelineWork::kForward) == 1, "there are ", of(PipelineWork::kForward), " forwards", what());
    const auto whole = of(PipelineWork::kBackward), inputs = of(PipelineWork::kInputGradients);
    TORCH_CHECK(whole + inputs == 1, "there are ", whole + inputs, " backwards (B or I)", what());
    TORCH_CHECK(of(PipelineWork::kWeightGradients) == inputs, "there are ", of(PipelineWork::kWeightGradients),
                " weight gradients (W) for ", inputs, " input gradients (I)", what());
  }

  const PipelineSchedule& schedule_;
  std::map<Key, int64_t> counts_;
};

void check_shape(const PipelineSchedule& schedule) {
  TORCH_CHECK(schedule.ranks() >= 1 && schedule.micro_batches >= 1, "the schedule ", schedule.name, " has ", schedule.ranks(),
              " ranks and ", schedule.micro_batches, " micro-batches");
  for (const auto rank : schedule.rank_of_stage)
    TORCH_CHECK(rank >= 0 && rank < schedule.ranks(), "a stage on rank ", rank, " of a pipeline of ", schedule.ranks(), " ranks");
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const auto& actions = schedule.actions[rank];
    TORCH_CHECK(actions.empty() || !actions.back().overlaps_next, "the last action of rank ", rank, ", ",
                to_string(actions.back()), ", overlaps with the next one");
  }
}

/// A stage that is gathered at some time must be so whenever it computes.
void check_residency(const PipelineSchedule& schedule, size_t rank) {
  std::map<int64_t, bool> gathered;
  const auto& actions = schedule.actions[rank];
  for (const auto& action : actions) {
    if (action.work == PipelineWork::kUnshard) gathered[action.stage] = false;
  }
  for (const auto& action : actions) {
    const auto found = gathered.find(action.stage);
    const bool is_free = action.work == PipelineWork::kReshard;
    if (action.work == PipelineWork::kUnshard) {
      TORCH_CHECK(!std::exchange(found->second, true), "rank ", rank, " gathers stage ", action.stage, " twice");
    } else if (found != gathered.end() || is_free) {
      TORCH_CHECK(found != gathered.end() && found->second, "rank ", rank, " does ", to_string(action), " while stage ",
                  action.stage, " is not gathered");
      if (is_free) found->second = false;
    }
  }
  for (const auto& [stage, stays] : gathered) TORCH_CHECK(!stays, "rank ", rank, " leaves stage ", stage, " gathered");
}

void check_ends(const PipelineSchedule& schedule) {
  Progress progress(schedule);
  progress.run([](size_t, size_t, size_t) {});
  std::string waiting;
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    if (progress.is_at_end(rank)) continue;
    waiting += c10::str("\n  rank ", rank, " in ", to_string(progress.next(rank)), " for ", text_of(progress.missing(rank)));
  }
  TORCH_CHECK(waiting.empty(), "the schedule ", schedule.name, " deadlocks, where these wait for ever:", waiting);
}

/// Messages of one kind between two ranks go through one queue.
void check_queues(const PipelineSchedule& schedule) {
  std::map<std::tuple<int64_t, int64_t, Product>, std::pair<std::vector<Part>, std::vector<Part>>> queues; // sent, taken
  const auto rank_of = [&](int64_t stage) { return schedule.rank_of_stage[static_cast<size_t>(stage)]; };
  for (size_t at = 0; at < schedule.actions.size(); ++at) {
    const auto rank = static_cast<int64_t>(at);
    for (const auto& action : schedule.actions[at]) {
      if (const auto taken = message_of(action, schedule))
        queues[{rank_of(taken->stage), rank, taken->product}].second.push_back(*taken);
      const auto sent = part_of(action);
      const auto to = sent ? action.stage + (sent->product == Product::kOutputs ? 1 : -1) : -1;
      if (to < 0 || to >= schedule.stages() || rank_of(to) == rank) continue;
      queues[{rank, rank_of(to), sent->product}].first.push_back(*sent);
    }
  }
  for (const auto& [edge, queue] : queues) {
    const auto& [sent, taken] = queue;
    const auto differs = std::mismatch(sent.begin(), sent.end(), taken.begin(), taken.end());
    TORCH_CHECK(differs.first == sent.end(), "rank ", std::get<1>(edge), " takes ", text_of(*differs.second), " from rank ",
                std::get<0>(edge), ", which sends ", text_of(*differs.first), " before it");
  }
}

} // namespace

void check_schedule(const PipelineSchedule& schedule) {
  check_shape(schedule);
  Counts(schedule).check_complete();
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) check_residency(schedule, rank);
  check_ends(schedule);
  check_queues(schedule);
}

} // namespace tessera
