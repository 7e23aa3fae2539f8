#include <tessera/fsdp/schedule/step.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::internal {

void Step::set_places(const std::vector<GroupPlace>& places) {
  notes_.clear();
  std::vector<bool> has_buckets;
  for (const auto& place : places) {
    notes_.push_back({.place = place});
    has_buckets.push_back(place.module.has_buckets());
  }
  reads_.set_groups(has_buckets);
  reductions_.set_groups(places.size());
}

void Step::enter(State next) {
  const bool legal = next == State::kForward    ? state_ == State::kIdle
                     : next == State::kBackward ? state_ != State::kBackward
                                                : state_ == State::kBackward;
  TORCH_INTERNAL_ASSERT(legal, "the step goes from state ", static_cast<int>(state_), " to ", static_cast<int>(next));
  state_ = next;
  ++phase_;
}

void Step::begin_forward() {
  enter(State::kForward);
  reads_.begin_forward();
}

void Step::begin_backward() {
  enter(State::kBackward);
  micro_batches_.note_backward();
  reads_.begin_backward();
  next_to_reduce_ = static_cast<int64_t>(reads_.order().size()) - 1;
  for (const size_t group : reads_.order()) {
    groups_.forget_landed(group);
    notes_[group].is_reduced = false;
  }
}

void Step::end_backward() {
  for (const size_t group : reductions_.unfinished()) {
    if (exists(group)) groups_.withhold_unreduced(group);
  }
  std::erase_if(open_, [&](size_t group) {
    const auto residence = groups_.residence(group);
    if (residence == Residence::kGone) return true;
    if (!rules_of(group).reshards_after_backward) return !is_open(residence);
    groups_.free(group);
    notes_[group].is_held = false;
    return true;
  });
  for (const size_t group : reads_.order()) {
    auto& note = notes_[group];
    note.last_backward = {note.recomputation, /*is_read=*/note.unread_phase != phase_,
                          /*brings_gradients=*/note.landed_phase == phase_};
  }
  reads_.end_backward();
  enter(State::kIdle);
}

std::vector<size_t> Step::abandon_backward() {
  enter(State::kIdle);
  reads_.abandon_backward();
  give_up_micro_batches();
  auto dropped = reads_.recorded_groups();
  const auto unfinished = reductions_.give_up();
  dropped.insert(dropped.end(), unfinished.begin(), unfinished.end());
  return dropped;
}

void Step::limit(GroupRules& rules) const {
  rules.syncs = rules.syncs && micro_batches_.running()->is_last;
  if (!micro_batches_.keeps_gathered()) return;
  rules.reshards_after_forward = false;
  rules.reshards_after_backward = rules.reshards_after_backward && micro_batches_.running()->is_last;
}

void Step::begin_phase(const MicroBatch& phase, bool trains) {
  micro_batches_.begin(phase, trains);
  if (trains || phase.phase != MicroBatchPhase::kForward) phases_.begin(phase.phase);
  if (phase.phase == MicroBatchPhase::kForward && state_ == State::kForward) {
    ++phase_;
    reads_.end_trace();
  }
  prefetch_first(phase.phase);
}

void Step::end_phase(bool has_failed) {
  const auto ended = micro_batches_.running();
  micro_batches_.end(has_failed);
  if (!ended || is_in_backward()) return; // which has failed: the next event frees
  if (has_failed || ended->is_last || ended->residency == Residency::kMicroBatch) close_all();
  if (has_failed) return phases_.forget();
  if (ended->is_last) return phases_.end_step(); // an optimizer writes the parameters before the next one
  if (const auto next = phases_.next()) prefetch_first(*next);
}

void Step::read_anew(const Read& read, bool is_first) {
  const bool is_traced = read.in_grad_mode || micro_batches_.running(); // of evaluations the first reads alone are
  if (is_traced && !read.in_backward && !is_in_backward()) reads_.repeat(read.group);
  if (!read.by_own_function) close_unrelated(read.group, read.recomputation);
  if (!is_open(read.residence)) gather(read.group);
  groups_.wait(read.group);
  prefetch_after(read.group, rules_of(read.group), PrefetchTrigger::kRead, is_first);
  if (is_in_backward()) reads_.step_back(read.group);
}

bool Step::is_module_recorded(size_t group) const {
  const auto& module = notes_[group].place.module;
  for (size_t each = module.first; each < module.end; ++each) {
    if (reads_.is_recorded(each)) return true;
  }
  return false;
}

std::vector<Step::Part> Step::trace() const {
  std::vector<Part> parts;
  for (const size_t group : reads_.gathering_reads()) parts.push_back({group, notes_[group].last_backward});
  return parts;
}

void Step::gather(size_t group) {
  if (std::find(open_.begin(), open_.end(), group) == open_.end()) open_.push_back(group); // or resharded since, as a stale one
  groups_.gather(group);
}

void Step::unshard(size_t group) {
  if (groups_.is_stale(group)) written(group);
  if (!is_open(groups_.residence(group))) gather(group);
  notes_[group].is_held = true;
}

void Step::reshard(size_t group) {
  groups_.free(group);
  notes_[group].is_held = false;
  std::erase(open_, group);
}

void Step::reshard_after_forward(size_t group) {
  if (micro_batches_.keeps_gathered()) return;
  groups_.free_after_forward(group);
  std::erase(open_, group);
}

void Step::look_anew() {
  for (auto& note : notes_) note.phase = 0;
}

/// At the end of what they were gathered for.
void Step::close_all() {
  std::erase_if(open_, [&](size_t group) {
    if (!is_open(groups_.residence(group))) return true;
    if (notes_[group].is_held || !rules_of(group).reshards_after_backward) return false;
    groups_.free_after_forward(group);
    return true;
  });
}

void Step::close_unrelated(size_t group, uint64_t recomputation) {
  std::erase_if(open_, [&](size_t other) {
    const auto residence = groups_.residence(other);
    if (!is_open(residence)) return true;
    if (stays_open(other, residence, group, recomputation)) return false;
    is_in_backward() ? groups_.free(other) : groups_.free_after_forward(other);
    return true;
  });
}

bool Step::stays_open(size_t group, Residence residence, size_t read, uint64_t recomputation) const {
  const auto& note = notes_[group];
  // The gradients of what a recomputation reads come next, as do those of what forward left open. A group that another
  // recomputation left open is open only for frozen parameters, and may be freed.
  const bool is_needed = recomputation > 0 && (note.recomputation == 0 || note.recomputation == recomputation);
  const bool is_kept = std::find(kept_.begin(), kept_.end(), group) != kept_.end();
  if (is_kept || note.is_held || is_needed || are_related(group, read)) return true;
  const auto rules = rules_of(group);
  if (residence == Residence::kGathering) {
    if (!is_passed(group, read)) return true;
  } else if (!rules.reshards_after_backward) { // it stays until the next forward reads it
    const bool is_read = !is_in_backward() && note.phase == phase_;
    if (!is_read && !groups_.is_stale(group)) return true;
  }
  return !(is_in_backward() && note.is_reduced) && !rules.reshards_after_forward;
}

bool Step::are_related(size_t a, size_t b) const {
  const auto [above, below] = std::minmax({notes_[a].place.module.first, notes_[b].place.module.first});
  return below < notes_[above].place.end;
}

} // namespace tessera::internal
