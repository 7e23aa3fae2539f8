#include <tessera/parallel/run/step_times.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include <tessera/collectives/ranks/gather_texts.h>

namespace tessera::internal::pipeline {

namespace {

/// The actions of a rank with the times that `text` has of them, instead of simulated ones.
void take_times(PipelineSimulation::Rank& rank, const std::vector<PipelineAction>& actions, const std::string& text) {
  std::istringstream in(text);
  rank.spans.clear();
  rank.busy = 0;
  for (const auto& action : actions) {
    auto& span = rank.spans.emplace_back();
    span.action = action;
    in >> span.begin >> span.end;
    rank.busy += span.end - span.begin;
  }
  TORCH_INTERNAL_ASSERT(!in.fail(), "the times of a pipeline's step cannot be read: ", text);
}

} // namespace

std::string StepTimes::to_text() const {
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::max_digits10);
  for (const auto& [begin, end] : times_) out << begin << ' ' << end << ' ';
  return std::move(out).str();
}

PipelineSimulation StepTimes::gather(const PipelineSchedule& schedule, Communicator& communicator, c10::Device device) const {
  const auto texts = gather_texts(to_text(), communicator, device, "times of a pipeline's step");
  auto measured = simulate_pipeline(schedule); // for what ranks keep
  double first = std::numeric_limits<double>::max(), last = 0;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    take_times(measured.ranks[rank], schedule.actions[rank], texts[rank]);
    for (const auto& span : measured.ranks[rank].spans) {
      first = std::min(first, span.begin);
      last = std::max(last, span.end);
    }
  }
  for (auto& rank : measured.ranks) {
    for (auto& span : rank.spans) {
      span.begin -= first;
      span.end -= first;
    }
  }
  measured.makespan = last - first;
  return measured;
}

} // namespace tessera::internal::pipeline
