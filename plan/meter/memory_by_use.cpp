#include <tessera/plan/meter/memory_by_use.h>

#include <algorithm>
#include <limits>
#include <unordered_map>

namespace tessera::internal {

namespace {

using Event = MetaMemory::Event;
constexpr size_t kNever = std::numeric_limits<size_t>::max();

struct Life {
  int64_t bytes = 0;
  size_t begin = 0, end = kNever; ///< events
  PlanPhase phase = PlanPhase::kSetup;
};

PlanPhase phase_of(const Event& event) { return static_cast<PlanPhase>(event.phase); }

/// The second run of a forward is a part of backward.
bool is_same_part(PlanPhase a, PlanPhase b) {
  const auto part = [](PlanPhase phase) { return phase == PlanPhase::kRecompute ? PlanPhase::kBackward : phase; };
  return part(a) == part(b);
}

class Replay {
 public:
  Replay(const std::vector<Event>& events, const MeterSettings& settings) : events_(events), settings_(settings) {
    for (size_t i = 0; i < events.size(); ++i) note(i);
    find_ends();
  }

  MeasuredMemory run() {
    held_.buffers = settings_.buffers;
    held_.parameters = -settings_.buffers; // they were born with the parameters
    for (size_t i = 0; i < events_.size(); ++i) {
      apply(i);
      if (i + 1 >= settings_.begin) look(i);
    }
    return measured_;
  }

 private:
  void note(size_t i) {
    const auto& event = events_[i];
    if (event.kind == Event::Kind::kBegin) {
      const auto rounded = (event.bytes + settings_.granularity - 1) / settings_.granularity * settings_.granularity;
      lives_.push_back({event.use == MemoryUse::kNothing ? 0 : rounded, i, kNever, phase_of(event)});
    } else if (event.kind == Event::Kind::kEnd) {
      lives_[event.block].end = i;
    }
  }

  /// The event after which a phase that an event is in has ended, and the next one of an optimizer.
  void find_ends() {
    end_of_phase_.resize(events_.size());
    size_t end = events_.size();
    for (size_t i = events_.size(); i-- > 0;) {
      if (i + 1 < events_.size() && !is_same_part(phase_of(events_[i]), phase_of(events_[i + 1]))) end = i + 1;
      end_of_phase_[i] = end;
    }
    optimizer_after_.resize(events_.size());
    size_t optimizer = events_.size();
    for (size_t i = events_.size(); i-- > 0;) {
      if (phase_of(events_[i]) == PlanPhase::kOptimizer) optimizer = i;
      optimizer_after_[i] = optimizer;
    }
  }

  bool outlives_its_phase(const Life& life) const { return life.end >= end_of_phase_[life.begin]; }
  /// What does not is a sum over micro-batches that is still to be reduced.
  bool reaches_the_optimizer(const Life& life) const { return life.end > optimizer_after_[life.begin]; }

  int64_t PlanMemory::*category_of(const Life& life, MemoryUse use) const {
    switch (use) {
      case MemoryUse::kUnsharded: return &PlanMemory::unsharded;
      case MemoryUse::kReduceBuffer: return &PlanMemory::reduce_buffers;
      case MemoryUse::kCached: return &PlanMemory::cached;
      case MemoryUse::kNothing: // whose life has no bytes
      case MemoryUse::kAny: break;
    }
    switch (life.phase) {
      case PlanPhase::kSetup: return &PlanMemory::parameters;
      case PlanPhase::kForward: return outlives_its_phase(life) ? &PlanMemory::activations : &PlanMemory::temporaries;
      case PlanPhase::kRecompute: return &PlanMemory::activations;
      case PlanPhase::kBackward:
        if (!outlives_its_phase(life)) return &PlanMemory::temporaries;
        return settings_.is_offloaded && !reaches_the_optimizer(life) ? &PlanMemory::reduce_buffers : &PlanMemory::gradients;
      case PlanPhase::kOptimizer: return outlives_its_phase(life) ? &PlanMemory::optimizer_state : &PlanMemory::temporaries;
    }
    return &PlanMemory::temporaries;
  }

  void apply(size_t i) {
    const auto& event = events_[i];
    const auto& life = lives_[event.block];
    auto& now = uses_[event.block];
    if (event.kind != Event::Kind::kBegin) held_.*now -= life.bytes;
    if (event.kind == Event::Kind::kEnd) return void(uses_.erase(event.block));
    now = category_of(life, event.use);
    held_.*now += life.bytes;
  }

  void look(size_t i) {
    auto here = held_;
    if (settings_.is_offloaded) {
      const int64_t elsewhere = here.parameters + here.gradients + here.optimizer_state;
      measured_.host_bytes = std::max(measured_.host_bytes, elsewhere);
      here.parameters = here.gradients = here.optimizer_state = 0;
    }
    const int64_t total = here.total();
    auto& of_phase = measured_.peak_of_phase[events_[i].phase];
    of_phase = std::max(of_phase, total);
    if (total <= measured_.at_peak.total()) return;
    measured_.at_peak = here;
    measured_.peak_phase = phase_of(events_[i]);
  }

  const std::vector<Event>& events_;
  const MeterSettings settings_;
  std::vector<Life> lives_;                                  // by block
  std::vector<size_t> end_of_phase_, optimizer_after_;       // by event
  std::unordered_map<uint32_t, int64_t PlanMemory::*> uses_; // of blocks that live
  PlanMemory held_;
  MeasuredMemory measured_;
};

} // namespace

MeasuredMemory memory_by_use(const std::vector<Event>& events, const MeterSettings& settings) {
  return Replay(events, settings).run();
}

} // namespace tessera::internal
