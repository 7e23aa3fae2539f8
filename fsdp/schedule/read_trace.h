#pragma once

// Internal: what the forwards of a model have read, and in which order.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/fsdp/schedule/step_groups.h>

namespace tessera::internal {

/// Records what a forward reads, and foretells what comes next where the one that runs reads as the last did. It knows the groups
/// by their numbers.
///
/// The order has each group once, at its first read. The trace has also a group's reads after it was freed. Both are kept of the
/// last complete forward, and recorded in the one that runs, or whose backward does.
class ReadTrace {
 public:
  using Order = std::vector<size_t>;

  /// `groups` lives as long as this.
  explicit ReadTrace(const StepGroups& groups) : groups_(groups) {}
  /// The groups by their numbers, before the first event: whether each is one of several of its module.
  void set_groups(const std::vector<bool>& has_buckets);

  // Phases.
  void begin_forward();
  /// The read of `first`, which was the last event, begins one more forward before a backward.
  void begin_another_forward(size_t first);
  void begin_backward();
  void end_backward();
  void abandon_backward() { in_backward_ = false; }

  // Reads of a forward.
  /// The first one of `group`, in grad mode or not.
  void record(size_t group);
  /// The trace begins anew at the first read in grad mode: an evaluation that ended early, perhaps with an error, and a training
  /// forward are no trace together.
  void train() {
    if (!tracing_.trains) begin_training_trace();
  }
  /// A read that is perhaps not its group's first.
  void repeat(size_t group);
  /// The reads that follow are of another micro-batch.
  void end_trace();
  /// Backward has read `group`: the read of forward before this one is to be read again next.
  void step_back(size_t group);

  // What was read.
  uint64_t forward_number() const { return forward_; } ///< changes with every forward that follows a backward
  bool is_recorded(size_t group) const { return positions_[group].recorded_forward == forward_; }
  bool has_recorded_any() const { return !recording_.empty(); }
  bool knows_order() const { return !order_.empty(); } ///< of an earlier forward
  const Order& order() const { return recording_.empty() ? order_ : recording_; }
  /// The groups that the last complete forward has read, and those of the one that runs: some perhaps twice.
  Order recorded_groups() const {
    Order groups = order_;
    groups.insert(groups.end(), recording_.begin(), recording_.end());
    return groups;
  }
  int64_t position_of(size_t group) const { return positions_[group].order; } ///< in `order()`; -1: none
  /// The reads that the last forward may have gathered for, in their order; none before the first forward.
  Order gathering_reads() const;

  // What will be read.
  /// The first read of a forward, or of its backward; none where none is known.
  std::optional<size_t> first_read(bool in_forward) const;
  /// The `step`-th group that this phase will need after a read of `group`, as far as it is known.
  std::optional<size_t> next_read(size_t group, int64_t step, bool is_first_read) const;
  /// The same by the order of first reads. Before an order is known, it is guessed, at the first read of `group` in this phase
  /// alone.
  std::optional<size_t> next_in_order(size_t group, int64_t step, bool is_first_read) const;
  /// Whether a forward that reads `group` has gone on without `ahead`, which was gathered ahead.
  bool is_passed(size_t ahead, size_t group) const;

 private:
  struct Trace {
    Order reads;
    bool has_repeats = false; ///< of a group that was freed between
    bool trains = false;      ///< the reads are in grad mode, and no evaluation's
  };
  /// The places of a group in what is recorded.
  struct Position {
    bool has_buckets = false;
    int64_t order = -1;            ///< in the recorded order
    int64_t trace = -1;            ///< of its latest read in the trace; in backward of the one whose backward comes next
    uint64_t recorded_forward = 0; ///< the last forward that recorded it
  };

  void place(size_t group);
  void begin_training_trace();
  void trace_read(size_t group);
  bool follows(const Trace& trace, size_t group) const;
  int64_t known_position(size_t group) const; // -1: none
  std::optional<size_t> next_registered(size_t group, int64_t step) const;
  /// The order in which this phase is expected to read the groups: the last forward's, or in backward the current one's.
  const Order& known_order() const { return !in_backward_ && !order_.empty() ? order_ : order(); }
  /// The trace that this phase is expected to follow, in backward from its end.
  const Trace& known_trace() const {
    const bool is_latest = in_backward_ || trace_.reads.empty();
    return is_latest && !tracing_.reads.empty() ? tracing_ : trace_;
  }

  const StepGroups& groups_;
  std::vector<Position> positions_;
  Order order_;           // of first reads in the last complete forward
  Order recording_;       // in the forward that runs, or whose backward does
  Trace trace_, tracing_; // the same, of all reads that may gather
  uint64_t forward_ = 0;
  bool in_backward_ = false;
};

} // namespace tessera::internal
