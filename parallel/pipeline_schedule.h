#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// What a rank of a pipeline does with a stage, as torch.distributed.pipelining names it.
enum class PipelineWork : uint8_t {
  kForward,         ///< F
  kBackward,        ///< B: the gradients of a stage's inputs and of its weights
  kInputGradients,  ///< I: the first half of B, which the stage before waits for
  kWeightGradients, ///< W: the other half, which nobody waits for
  kUnshard,         ///< UNSHARD: the stage's parameters are gathered from now on
  kReshard,         ///< RESHARD: they are freed
};

struct PipelineAction {
  PipelineWork work = PipelineWork::kForward;
  int64_t stage = 0;
  int64_t micro_batch = -1;   ///< counted from 0; -1 of kUnshard and kReshard, which are of no one
  bool overlaps_next = false; ///< it may run beside the next action: a forward beside a backward of DualPipeV

  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

/// "2F0": the forward of micro-batch 0 in stage 2; "1UNSHARD".
std::string to_string(const PipelineAction& action);

/// What each rank of a pipeline does in a step, in order. A schedule is data: it can be made here, read from a file, changed,
/// checked, simulated and drawn without a model.
struct PipelineSchedule {
  std::string name;
  int64_t micro_batches = 0;
  std::vector<int64_t> rank_of_stage;               ///< by stage
  std::vector<std::vector<PipelineAction>> actions; ///< by rank

  int64_t ranks() const { return static_cast<int64_t>(actions.size()); }
  int64_t stages() const { return static_cast<int64_t>(rank_of_stage.size()); }
  /// Some backward has two halves.
  bool splits_backward() const;

  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

enum class PipelineScheduleKind : uint8_t {
  kGPipe,                 ///< "gpipe": all forwards, then all backwards (arXiv 1811.06965)
  k1F1B,                  ///< "1f1b": a backward after each forward, once the pipeline is full (2104.04473)
  kInterleaved1F1B,       ///< "interleaved-1f1b": the same over several stages a rank
  kLoopedBFS,             ///< "looped-bfs": all forwards stage by stage, then the backwards (2211.05953)
  kZeroBubbleH1,          ///< "zb-h1": 1F1B whose weight gradients fill the waiting (2401.10241)
  kInterleavedZeroBubble, ///< "interleaved-zb": the same over several stages a rank
  kZeroBubbleV,           ///< "zb-v": two stages a rank, the first and the last of them on rank 0 (2405.15362)
  kDualPipeV,             ///< "dualpipe-v": the same, with forwards that run beside backwards
};

/// All kinds, with the names above.
struct PipelineScheduleName {
  PipelineScheduleKind kind;
  std::string_view name;
};
const std::vector<PipelineScheduleName>& pipeline_schedule_names();
/// Throws with the names that there are for an unknown one.
PipelineScheduleKind pipeline_schedule_kind(std::string_view name);

struct PipelineShape {
  int64_t ranks = 1;
  int64_t micro_batches = 1;
  /// Stages a rank. 1 under the schedules of one stage a rank, 2 under the two of a V, any number under the others.
  int64_t chunks = 1;
  /// How many micro-batches pass through a rank's stage before its next stage takes them, under the interleaved schedules.
  /// 0 takes the number that PyTorch takes: micro_batches / max(1, micro_batches / ranks), which must divide them.
  int64_t group = 0;
};

/// The schedule of a kind. Stage s is on rank s % ranks, under a V on rank s or 2 ranks - 1 - s. The orders are those of PyTorch
/// 2.11. Throws where the kind cannot be made for the shape: with the nearest numbers of micro-batches that it can.
PipelineSchedule pipeline_schedule(PipelineScheduleKind kind, const PipelineShape& shape);

/// A line a rank, its actions between commas, as PyTorch writes and reads it: `0F0,0F1,0B0`, overlapping ones as
/// `(0F4;3B0)OVERLAP_F_B`. What sends, receives and reduces, which PyTorch may write too, is passed over: it follows from the
/// rest.
std::string to_csv(const PipelineSchedule& schedule);
/// Reads such a text. A stage is on the rank whose line computes it. Throws for a word that is no action, with its rank and
/// place, and for whatever `check_schedule` finds.
PipelineSchedule schedule_from_csv(std::string_view text, std::string name = "csv");

/// Throws, with the rank and the action, unless
///   - each stage computes F of each micro-batch once, and B, or I and then W, once after it, on the stage's rank;
///   - a stage that is gathered (kUnshard) is so whenever it computes;
///   - all ranks come to their end: none waits for what comes after its own next action;
///   - each rank takes what another sends to it in the order of the sending, forwards and backwards apart.
void check_schedule(const PipelineSchedule& schedule);

/// The schedule with kUnshard and kReshard for at most `active` stages a rank at once: the next ones that it computes. `active`
/// of the rank's stages or more gives one gather a stage and step. As FSDP under torch.distributed.pipelining does it.
PipelineSchedule with_residency(PipelineSchedule schedule, int64_t active);

/// How long each work takes, in any unit.
struct PipelineCosts {
  double forward = 1, input_gradients = 1, weight_gradients = 1; ///< of a stage; B takes the sum of the last two
  double message = 0;                                            ///< from one rank to another, beside which both go on
  double overlap = 0;                ///< of overlapping actions, the share of the shorter one that takes no time of its own
  std::vector<double> stage_factors; ///< by stage, times the costs above; empty for 1
};

/// What a step takes.
struct PipelineSimulation {
  struct Span {
    PipelineAction action;
    double begin = 0, end = 0;
  };
  struct Rank {
    std::vector<Span> spans;
    double busy = 0;
    int64_t live_forwards = 0;   ///< at most: those whose backward, or weight gradients, have not ended
    int64_t resident_stages = 0; ///< at most, with kUnshard; all of its stages without
    int64_t gathers = 0;         ///< kUnshard
  };
  std::vector<Rank> ranks;
  double makespan = 0; ///< from the first begin to the last end

  /// The share of the ranks' time in which they wait.
  double idle_share() const;
};

/// Runs `schedule`, which must pass `check_schedule`. All ranks begin together.
PipelineSimulation simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

/// A picture of a simulation as SVG: a row a rank, a box an action with its micro-batch, stages of a rank by shade.
std::string to_svg(const PipelineSimulation& simulation);

} // namespace tessera
