#pragma once

// Internal: what an action of a pipeline waits for.

#include <optional>
#include <set>
#include <vector>

#include <tessera/parallel/pipeline_schedule.h>

namespace tessera::internal::pipeline {

inline bool computes(PipelineWork work) { return work != PipelineWork::kUnshard && work != PipelineWork::kReshard; }
/// B, or its first half.
inline bool gives_input_gradients(PipelineWork work) {
  return work == PipelineWork::kBackward || work == PipelineWork::kInputGradients;
}

/// The parts of a step that others wait for.
enum class Product : uint8_t { kOutputs, kInputGradients };
struct Part {
  Product product;
  int64_t stage, micro_batch;
  friend auto operator<=>(const Part&, const Part&) = default;
};

/// What the action makes; nothing of weight gradients, gathers and frees.
std::optional<Part> part_of(const PipelineAction& action);
/// What it needs, of its own stage and of those beside it.
std::vector<Part> needs_of(const PipelineAction& action, int64_t stages);

/// The one that comes from another rank, if any: a message.
std::optional<Part> message_of(const PipelineAction& action, const PipelineSchedule& schedule);

/// Performs the ranks' actions as far as they go: `can_start(action, rank)` is asked of each rank's next one, and `perform`
/// called where it may. Overlapping ones go together. Returns how many actions each rank has performed.
class Progress {
 public:
  explicit Progress(const PipelineSchedule& schedule) : schedule_(schedule), next_(schedule.actions.size(), 0) {}

  /// Calls `perform(rank, begin, end)` for the actions [begin, end) of a rank that can go now, until no rank can go on.
  template <typename Perform>
  void run(const Perform& perform) {
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        while (const auto end = end_of_next(rank)) {
          perform(rank, next_[rank], *end);
          for (auto& at = next_[rank]; at < *end; ++at) note(schedule_.actions[rank][at]);
          goes_on = true;
        }
      }
    }
  }

  bool is_at_end(size_t rank) const { return next_[rank] == schedule_.actions[rank].size(); }
  const PipelineAction& next(size_t rank) const { return schedule_.actions[rank][next_[rank]]; }
  /// Something that the rank's next action needs and nobody has made.
  Part missing(size_t rank) const;

 private:
  std::optional<size_t> end_of_next(size_t rank) const;
  bool is_ready(const PipelineAction& action) const;
  void note(const PipelineAction& action);

  const PipelineSchedule& schedule_;
  std::vector<size_t> next_;
  std::set<Part> made_;
};

} // namespace tessera::internal::pipeline
