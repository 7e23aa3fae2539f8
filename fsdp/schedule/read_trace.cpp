#include <tessera/fsdp/schedule/read_trace.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

/// How long a trace is at most, in groups: forwards without a backward may follow each other for ever.
constexpr size_t kLongestTrace = 8;

} // namespace

void ReadTrace::set_groups(const std::vector<bool>& has_buckets) {
  positions_.clear();
  for (const bool each : has_buckets) positions_.push_back({.has_buckets = each});
}

void ReadTrace::begin_forward() {
  ++forward_;
  recording_.clear();
  tracing_ = {};
}

void ReadTrace::begin_another_forward(size_t first) {
  const bool is_traced = !tracing_.reads.empty() && tracing_.reads.back() == first;
  if (is_traced) tracing_.reads.pop_back();
  end_trace();
  tracing_.trains = true;
  if (is_traced) trace_read(first);
}

/// Replays the trace from its end. Where each group is read once, the positions are there.
void ReadTrace::begin_backward() {
  in_backward_ = true;
  const Trace& trace = known_trace();
  if (!trace.has_repeats) return;
  for (size_t i = 0; i < trace.reads.size(); ++i) positions_[trace.reads[i]].trace = static_cast<int64_t>(i);
}

void ReadTrace::end_backward() {
  if (!recording_.empty()) order_ = std::exchange(recording_, {});
  end_trace();
  in_backward_ = false;
}

void ReadTrace::record(size_t group) {
  const bool is_first = recording_.empty();
  auto& position = positions_[group];
  position.recorded_forward = forward_;
  // Buckets come before what forward reads: another rank may read others of them, or first in another place.
  for (size_t each = 0; is_first && each < positions_.size(); ++each) {
    if (positions_[each].has_buckets) place(each);
  }
  if (position.has_buckets) return;
  place(group);
  trace_read(group);
}

void ReadTrace::place(size_t group) {
  positions_[group].order = static_cast<int64_t>(recording_.size());
  recording_.push_back(group);
}

void ReadTrace::begin_training_trace() {
  for (auto& position : positions_) position.trace = -1;
  tracing_ = {.trains = true};
}

void ReadTrace::trace_read(size_t group) {
  positions_[group].trace = static_cast<int64_t>(tracing_.reads.size());
  tracing_.reads.push_back(group);
}

void ReadTrace::repeat(size_t group) {
  auto& reads = tracing_.reads;
  const bool is_traced = !reads.empty() && reads.back() == group;
  if (is_traced || positions_[group].has_buckets || reads.size() >= kLongestTrace * positions_.size()) return;
  tracing_.has_repeats = tracing_.has_repeats || follows(tracing_, group);
  trace_read(group);
}

void ReadTrace::end_trace() {
  if (!tracing_.reads.empty()) trace_ = std::exchange(tracing_, {});
}

/// Moves the position of a group to its read before, if there is one.
void ReadTrace::step_back(size_t group) {
  const Trace& trace = known_trace();
  if (!trace.has_repeats || !follows(trace, group)) return;
  auto& position = positions_[group].trace;
  for (auto before = position - 1; before >= 0; --before) {
    if (trace.reads[static_cast<size_t>(before)] == group) return void(position = before);
  }
}

/// Whether the latest read of `group` is one of the trace.
bool ReadTrace::follows(const Trace& trace, size_t group) const {
  const auto own = positions_[group].trace;
  return own >= 0 && own < static_cast<int64_t>(trace.reads.size()) && trace.reads[static_cast<size_t>(own)] == group;
}

ReadTrace::Order ReadTrace::gathering_reads() const {
  Order found;
  const auto add = [&](size_t group) {
    if (is_recorded(group)) found.push_back(group);
  };
  const auto& reads = tracing_.reads.empty() ? trace_.reads : tracing_.reads;
  const bool has_repeats = reads.size() > order().size();
  for (const size_t each : order()) {
    if (!has_repeats || std::find(reads.begin(), reads.end(), each) == reads.end()) add(each);
  }
  if (has_repeats) std::for_each(reads.begin(), reads.end(), add);
  return found;
}

std::optional<size_t> ReadTrace::first_read(bool in_forward) const {
  const Order& reads = in_forward || tracing_.reads.empty() ? known_trace().reads : tracing_.reads;
  if (reads.empty()) return std::nullopt;
  return in_forward ? reads.front() : reads.back();
}

std::optional<size_t> ReadTrace::next_read(size_t group, int64_t step, bool is_first_read) const {
  const Trace& trace = known_trace();
  if (!follows(trace, group)) return next_in_order(group, step, is_first_read);
  const auto next = positions_[group].trace + (in_backward_ ? -step : step);
  if (next >= 0 && next < static_cast<int64_t>(trace.reads.size())) return trace.reads[static_cast<size_t>(next)];
  if (in_backward_ || knows_order()) return std::nullopt;
  return next_in_order(group, step, is_first_read);
}

std::optional<size_t> ReadTrace::next_in_order(size_t group, int64_t step, bool is_first_read) const {
  const Order& list = known_order();
  const auto size = static_cast<int64_t>(list.size()), own = positions_[group].order;
  if (own >= 0 && own < size && list[static_cast<size_t>(own)] == group) {
    const auto next = in_backward_ ? own - step : own + step;
    if (next >= 0 && next < size) return list[static_cast<size_t>(next)];
  }
  if (in_backward_ || knows_order() || !is_first_read) return std::nullopt;
  return next_registered(group, step);
}

/// In the first forward, perhaps of many without a backward: modules mostly run in the order in which they are registered.
std::optional<size_t> ReadTrace::next_registered(size_t group, int64_t step) const {
  for (size_t next = group + 1; next < positions_.size(); ++next) {
    const bool exists = groups_.residence(next) != Residence::kGone;
    if (!is_recorded(next) && exists && --step == 0) return next;
  }
  return std::nullopt;
}

int64_t ReadTrace::known_position(size_t group) const {
  const Order& list = known_order();
  const auto own = positions_[group].order;
  if (own >= 0 && own < static_cast<int64_t>(list.size()) && list[static_cast<size_t>(own)] == group) return own;
  const auto found = std::find(list.begin(), list.end(), group);
  return found == list.end() ? -1 : found - list.begin();
}

bool ReadTrace::is_passed(size_t ahead, size_t group) const {
  if (const Trace& trace = known_trace(); trace.has_repeats && follows(trace, group)) {
    const auto behind = trace.reads.begin() + static_cast<std::ptrdiff_t>(positions_[group].trace) + 1;
    if (std::find(behind, trace.reads.end(), ahead) != trace.reads.end()) return false;
  }
  const auto here = known_position(group), there = known_position(ahead);
  if (there < 0) return here >= 0 && here + 1 < static_cast<int64_t>(known_order().size());
  return there < here;
}

} // namespace tessera::internal
