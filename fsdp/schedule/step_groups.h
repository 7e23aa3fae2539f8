#pragma once

// Internal: what a step asks of a model's groups, and what it has them do.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::internal {

/// How far a group has come from its shard. One that communicates and copies nothing is always unsharded.
enum class Residence { kGone, kSharded, kGathering, kUnsharded };

inline bool is_open(Residence residence) { return residence == Residence::kGathering || residence == Residence::kUnsharded; }

/// What is gathered ahead when a group is needed, where there is no list.
struct PrefetchRule {
  bool is_prefetched_in_backward = true; ///< the group itself, by others
  int64_t depth = 1;                     ///< groups, in the recorded order
};

/// The collectives that reduce a group.
enum class Reductions {
  kOne,
  kTwo,       ///< one after the other; the second may be left to a later backward
  kSecondOne, ///< of two alone
};

/// How a group takes part in a step, as its strategy and the program have set it.
struct GroupRules {
  bool reshards_after_forward = true, reshards_after_backward = true;
  bool is_offloaded = false;
  PrefetchRule prefetch = {};
  bool syncs = true;            ///< this backward reduces
  bool keeps_gradients = false; ///< whole ones, until the last backward
  Reductions reductions = Reductions::kOne;
};

/// The groups of a model, by their numbers. `Step` asks what it decides by, and calls what it has decided, at once: what follows
/// may depend on it, and an error of an action ends the event.
class StepGroups {
 public:
  StepGroups() = default;
  StepGroups(const StepGroups&) = delete;
  StepGroups& operator=(const StepGroups&) = delete;
  virtual ~StepGroups() = default;

  // What is.
  virtual GroupRules rules(size_t group) const = 0;
  virtual std::vector<size_t> prefetch_list(size_t group, bool in_backward) const = 0;
  virtual Residence residence(size_t group) const = 0;
  virtual bool has_memory(size_t group) const = 0;     ///< false for one that is gone
  virtual bool is_stale(size_t group) const = 0;       ///< its shard was written since the gather
  virtual bool expects_any(size_t group) const = 0;    ///< gradients, by the reads of the forward
  virtual bool is_complete(size_t group) const = 0;    ///< all that are expected have landed
  virtual bool awaits_any(size_t group) const = 0;     ///< one has not landed, and the backward will bring it
  virtual bool has_pending(size_t group) const = 0;    ///< gradients that wait for their reduction
  virtual bool is_unfinished(size_t group) const = 0;  ///< they do, or are being reduced
  virtual bool leaves_out_any(size_t group) const = 0; ///< a frozen parameter
  virtual bool is_in_inner_backward() const = 0;       ///< one inside the backward that the step follows

  // What is to be done with its parameters. A group that is gone does nothing.
  virtual void gather(size_t group) = 0;
  virtual void wait(size_t group) = 0;
  virtual void free(size_t group) = 0;
  virtual void free_after_forward(size_t group) = 0; ///< perhaps all but a part among its neighbours
  virtual void fetch(size_t group) = 0;              ///< its shard, from where it is offloaded

  // What is to be done with its gradients.
  virtual void forget_landed(size_t group) = 0;
  virtual void join_reduction(size_t group) = 0; ///< although perhaps nothing lands
  virtual void keep_unreduced(size_t group) = 0;
  virtual void withhold_unreduced(size_t group) = 0;
  virtual bool start_reduction(size_t group) = 0; ///< whether it is in flight then
  virtual void advance_reduction(size_t group) = 0;
  virtual void finish_reduction(size_t group) = 0;
};

} // namespace tessera::internal
