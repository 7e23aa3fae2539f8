// The trace of a forward's reads, and its replay.

#include <tessera/fsdp/schedule/step.h>

#include <utility>

namespace tessera::internal {

namespace {

/// How long a trace is at most, in groups: forwards without a backward may follow each other for ever.
constexpr size_t kLongestTrace = 8;

} // namespace

/// An evaluation that ended early, perhaps with an error, and a training forward are no trace together.
void Step::begin_training_trace() {
  for (auto& note : notes_) note.trace_position = -1;
  tracing_ = {.trains = true};
}

void Step::trace_read(size_t group) {
  notes_[group].trace_position = static_cast<int64_t>(tracing_.reads.size());
  tracing_.reads.push_back(group);
}

/// A read that is not its group's first. Of evaluations there are the first ones alone, as often as they run.
void Step::trace_again(const Read& read) {
  if (read.in_backward || is_in_backward() || !(read.in_grad_mode || micro_batches_.running())) return;
  auto& reads = tracing_.reads;
  const bool is_traced = !reads.empty() && reads.back() == read.group;
  if (is_traced || notes_[read.group].place.module.has_buckets() || reads.size() >= kLongestTrace * notes_.size()) return;
  tracing_.has_repeats = tracing_.has_repeats || follows(tracing_, read.group);
  trace_read(read.group);
}

void Step::end_trace() {
  if (!tracing_.reads.empty()) trace_ = std::exchange(tracing_, {});
}

/// Where each group is read once, the positions are there.
void Step::replay_from_end() {
  const Trace& trace = known_trace();
  if (!trace.has_repeats) return;
  for (size_t i = 0; i < trace.reads.size(); ++i) notes_[trace.reads[i]].trace_position = static_cast<int64_t>(i);
}

/// Moves the position of a group that backward has read to the read of forward before, if there is one.
void Step::step_back(size_t group) {
  const Trace& trace = known_trace();
  if (!trace.has_repeats || !follows(trace, group)) return;
  auto& position = notes_[group].trace_position;
  for (auto before = position - 1; before >= 0; --before) {
    if (trace.reads[static_cast<size_t>(before)] == group) return void(position = before);
  }
}

/// Whether the latest read of `group` is one of the trace.
bool Step::follows(const Trace& trace, size_t group) const {
  const auto own = notes_[group].trace_position;
  return own >= 0 && own < static_cast<int64_t>(trace.reads.size()) && trace.reads[static_cast<size_t>(own)] == group;
}

} // namespace tessera::internal
