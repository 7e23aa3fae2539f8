#pragma once

// Internal: what the groups of one model do in a step, and when.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/fsdp/schedule/micro_batches.h>
#include <tessera/fsdp/schedule/read_trace.h>
#include <tessera/fsdp/schedule/reduction_queue.h>
#include <tessera/fsdp/schedule/step_groups.h>

namespace tessera::internal {

/// The numbers of a module's groups. If there are several, they are reduced together.
struct ModuleNumbers {
  size_t first, end;
  bool has_buckets() const { return end - first > 1; }
};

/// The place of a group in the tree of its model's modules. One without parameters stands for a module that has no group.
struct GroupPlace {
  ModuleNumbers module; ///< its own number is one of these
  size_t end;           ///< at `module.first`: the groups below its module have the numbers from `module.end` to here
};

/// Decides what the groups of one model do. Events go in, and actions come out: calls of `StepGroups`. There are no tensors, no
/// communication and no threads in it: the schedule performs its actions under its lock, and a prediction sums them.
///
/// Forward: the first read of a group waits for its gather, and frees every open group that is neither above nor below it, and
/// what was gathered ahead for a read that this forward has left out. A `ReadTrace` records these reads, and a group's reads
/// after it was freed. The next forward replays it: as long as its n-th read is the trace's, that starts the gathers of those
/// behind it. What departs from the trace is gathered when it is read. Backward: the same from the trace's end; a group whose
/// gradients have all landed is reduced and freed. Reductions start in the reverse order of the forward's first reads, in
/// whatever order gradients land. At most one reduce-scatter and one all-reduce are in flight.
///
/// Modules in buckets are reduced after the others, in the order of their parameters. All buckets of a module are reduced where
/// one has a gradient: another rank may use others, or read them in another order.
class Step {
 public:
  enum class State { kIdle, kForward, kBackward };

  struct Read {
    size_t group;
    Residence residence;          ///< of the group, when it is read
    bool in_backward = false;     ///< the read itself, perhaps before the step knows of the backward
    uint64_t recomputation = 0;   ///< whose second run reads, in a backward; 0: none
    bool by_own_function = false; ///< the backward of a program's function reads, whose gradients come at once
    bool in_grad_mode = true;
  };

  explicit Step(StepGroups& groups) : groups_(groups) {}
  /// The model's groups by their numbers, before the first event.
  void set_places(const std::vector<GroupPlace>& places);

  // Phases.
  void begin_forward();
  /// The read of `first`, which was the last event, begins one more forward before a backward.
  void begin_another_forward(size_t first) { reads_.begin_another_forward(first); }
  void begin_backward();
  /// Reduces what the backward leaves, and finishes all reductions where it is the last. Again where hooks have brought more.
  void reduce_the_rest();
  void end_backward();
  /// A backward ended with an exception. Returns the groups whose gradients are to be dropped, some perhaps twice.
  std::vector<size_t> abandon_backward();
  /// A phase of a micro-batch begins, which `micro_batches` does not refuse. Starts the gather that it waits for first.
  void begin_phase(const MicroBatch& phase, bool trains);
  /// It has ended, and with it what was gathered for it alone. Starts the gather that the next phase waits for first, as far as
  /// the phases of the last step foretell it.
  void end_phase(bool has_failed);
  /// A phase will begin, of which the program knows.
  void expect_phase(MicroBatchPhase phase) {
    if (!micro_batches_.running()) prefetch_first(phase);
  }
  const MicroBatches& micro_batches() const { return micro_batches_; }
  void give_up_micro_batches() {
    micro_batches_.give_up();
    phases_.forget();
  }

  // Reads.
  /// The shard of `group` was written: what is gathered of it is not valid any more.
  void written(size_t group) { groups_.free(group); }
  /// Gathers the group and what comes next. False where there is nothing to do: it is unsharded, and this phase has read it.
  bool read(const Read& read) {
    auto& note = notes_[read.group];
    // What another thread reads, for which a hook waits, is not recorded.
    if (!read.in_backward && !is_in_backward()) {
      if (read.in_grad_mode) reads_.train();
      if (!reads_.is_recorded(read.group)) reads_.record(read.group);
    }
    note.is_held = false;
    if (!read.in_backward || read.recomputation > 0) note.recomputation = read.recomputation;
    const bool is_first = std::exchange(note.phase, phase_) != phase_;
    if (read.residence == Residence::kUnsharded && !is_first) return false;
    read_anew(read, is_first);
    return true;
  }
  void unshard(size_t group); ///< by hand, and holds it until it is read
  void reshard(size_t group); ///< by hand
  void reshard_after_forward(size_t group);
  /// No read of another group frees `groups`, in place of those that were given before, which it returns.
  std::vector<size_t> keep_open(std::vector<size_t> groups) { return std::exchange(kept_, std::move(groups)); }
  /// Treats the next read of each group as its first in this phase.
  void look_anew();

  // Gradients.
  /// A gradient of `group` is about to go into the group's buffer, perhaps one that is to be the only buffer.
  void expect_landing(size_t group, bool needs_only_buffer) {
    notes_[group].landed_phase = phase_;
    reductions_.add_unfinished(group);
    if (needs_only_buffer) reductions_.finish();
  }
  /// It is there, perhaps the last that is expected. Whether reductions may be due, which `reduce_after` starts.
  bool landed(size_t group, bool is_complete) {
    if (notes_[group].place.module.has_buckets()) join_buckets(group);
    const bool is_next = reads_.position_of(group) == next_to_reduce_;
    return is_complete || !is_next || micro_batches_.is_in(MicroBatchPhase::kWeightGradients);
  }
  void reduce_after(size_t group);
  /// The gradients of `group` were dropped.
  void forget_gradients(size_t group) { reductions_.forget(group); }
  void set_is_last_backward(bool is_last) { is_last_backward_ = is_last; }
  bool is_last_backward() const { return is_last_backward_; }

  State state() const { return state_; }
  bool is_in_backward() const { return state_ == State::kBackward; }
  const ReadTrace& reads() const { return reads_; } ///< of forwards
  bool is_module_recorded(size_t group) const;      ///< in the forward that runs
  const GroupPlace& place_of(size_t group) const { return notes_[group].place; }
  const std::vector<size_t>& open_groups() const { return open_; } ///< and perhaps some that were freed since
  /// What the last backward made of a group.
  struct InBackward {
    uint64_t recomputation = 0; ///< whose second run read it; 0: none
    bool is_read = true;        ///< where no gradient of an input needs it, it may not be
    bool brings_gradients = true;
  };
  /// What is known of a group's part in a step: a read in the last forward, and the last backward.
  struct Part {
    size_t group;
    InBackward backward;
  };
  /// Of the reads that the last forward may have gathered for, in their order; none before the first forward.
  std::vector<Part> trace() const;

 private:
  /// Why a group is gathered ahead: it comes next, or a list of the program says so.
  enum class PrefetchReason { kOfOrder, kOfList };
  /// What triggers a prefetch. A reduction gathers no group ahead that its phase has read: they may have been freed for good.
  enum class PrefetchTrigger { kRead, kReduction };

  /// What the step notes of a group.
  struct Note {
    GroupPlace place;
    uint64_t landed_phase = 0;  ///< the last backward that brought a gradient
    uint64_t joined_phase = 0;  ///< the last backward in which it was to be reduced, perhaps with a bucket beside it
    uint64_t phase = 0;         ///< the last phase (forward or backward) that saw a read of this group
    uint64_t unread_phase = 0;  ///< the last backward that reduced the group before it was read
    uint64_t recomputation = 0; ///< whose second run read it last in a backward; 0: a forward did, or none
    PrefetchReason ahead = PrefetchReason::kOfOrder; ///< why it was gathered last before its read
    bool is_held = false;                            ///< by `unshard`, until its first read
    bool is_reduced = false;  ///< in this backward, and open for the frozen parameters that it may still read
    InBackward last_backward; ///< at its end
  };

  /// The rules of a group as the program has set them, within what the phase of a micro-batch allows.
  GroupRules rules_of(size_t group) const {
    auto rules = groups_.rules(group);
    if (micro_batches_.running()) limit(rules);
    return rules;
  }
  void limit(GroupRules& rules) const;
  void enter(State next);
  void read_anew(const Read& read, bool is_first);
  void gather(size_t group);
  void close_all();
  void close_unrelated(size_t group, uint64_t recomputation);
  bool stays_open(size_t group, Residence residence, size_t read, uint64_t recomputation) const;
  bool are_related(size_t a, size_t b) const;
  void prefetch_first(MicroBatchPhase phase);
  void prefetch_after(size_t group, const GroupRules& rules, PrefetchTrigger event, bool is_first_read);
  void prefetch(size_t group, PrefetchReason why);
  bool is_passed(size_t ahead, size_t group) const;
  void join_buckets(size_t landed);
  bool may_join(size_t group) const;
  bool awaits_gradients(size_t group) const;
  bool is_ready(size_t group) const;
  void gather_as_if_read(size_t group, const GroupRules& rules);
  void finish_group(size_t group);
  bool exists(size_t group) const { return groups_.residence(group) != Residence::kGone; }

  StepGroups& groups_;
  std::vector<Note> notes_;
  ReadTrace reads_{groups_};
  std::vector<size_t> open_; // gathered, or about to be
  std::vector<size_t> kept_; // by `keep_open`
  ReductionQueue reductions_{groups_};
  MicroBatches micro_batches_;
  PhaseOrder phases_; // of steps that train

  State state_ = State::kIdle;
  uint64_t phase_ = 1;          // changes with the state
  int64_t next_to_reduce_ = -1; // position in the forward order; all behind it have been reduced in the backward
  bool is_last_backward_ = true;
};

} // namespace tessera::internal
