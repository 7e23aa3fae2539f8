#pragma once

// Internal: a group in a step that is predicted, with sizes in place of blocks.

#include <cstdint>
#include <memory>
#include <optional>

#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/report/memory_account.h>
#include <tessera/fsdp/schedule/step.h>

namespace tessera::internal {

/// A group's parameters between the shard and the whole.
class PredictedGather {
 public:
  Residence residence() const { return residence_; }
  /// The shard was written since the gather.
  bool is_stale() const { return is_stale_; }
  void note_write() { is_stale_ = true; }

  void start(const ParameterGroup& group, MemoryAccount& memory);
  void finish(MemoryAccount& memory);
  void free(MemoryAccount& memory);
  /// Keeps a part of the unsharded parameters, where the strategy does.
  void free_after_forward(const ParameterGroup& group, MemoryAccount& memory);

 private:
  void release(MemoryAccount& memory);

  Residence residence_ = Residence::kSharded;
  bool is_stale_ = false;
  int64_t unsharded_ = 0, output_ = 0; ///< blocks that it has now
  int64_t messages_ = 0;               ///< a block of what a quantized gather sends
  int64_t kept_part_ = 0;              ///< of the unsharded parameters, after its forward
};

/// A group's gradients on their way to their parameters.
class PredictedReduction {
 public:
  PredictedReduction() = default;
  /// `local_bytes`: this rank's part of the parameters that train. `is_in_files`: `grad()` of them takes no memory.
  PredictedReduction(const ParameterGroup& group, int64_t local_bytes, bool is_in_files);

  bool is_running() const { return running_.has_value(); }
  bool has_buffer() const { return buffer_ > 0; }
  /// Bytes of what it delivers, as `grad()` holds that.
  int64_t delivered_bytes() const { return delivered_bytes_; }

  /// Makes the buffer, unless it is there.
  void allocate(const ParameterGroup& group, MemoryAccount& memory);
  /// False where nothing is to be reduced.
  bool start(const ParameterGroup& group, MemoryAccount& memory);
  /// The first of its collectives has ended.
  void advance(const ParameterGroup& group, MemoryAccount& memory);
  void finish(const ParameterGroup& group, MemoryAccount& memory);

 private:
  struct Running {
    int64_t written = 0;
    bool has_advanced = false; ///< beyond the first of its collectives
  };
  void write(int64_t bytes, MemoryAccount& memory);

  int64_t buffer_bytes_ = 0; ///< what it takes
  int64_t chunk_bytes_ = 0;  ///< this rank's part of it
  int64_t delivered_bytes_ = 0;
  int64_t buffer_ = 0; ///< a block that it has now
  std::optional<Running> running_;
};

/// The sizes of a group's gradients before their reduction.
struct GradientSizes {
  int64_t largest = 0;       ///< of one parameter, whole
  int64_t last = 0;          ///< of the one that lands last
  int64_t all = 0;           ///< of all parameters, whole
  int64_t largest_local = 0; ///< this rank's part of one parameter
};

/// The gradients of a group that have come in a backward.
struct PredictedLanding {
  int64_t summed = 0;       ///< those that autograd holds of its later reads
  bool is_complete = false; ///< all have landed
  bool is_pending = false;  ///< some wait for their reduction
};

/// What the prediction knows of a group.
struct PredictedGroup {
  std::shared_ptr<ParameterGroup> group = {}; ///< null for a number that no group below the root has
  const GradientSettings* settings = nullptr;
  bool trains = false, leaves_out_any = false;
  bool steps = false;           ///< in backward, all of its parameters
  bool is_above_others = false; ///< whose gradients begin to land at the start of a backward
  Step::InBackward backward = {};
  GradientSizes gradients = {};
  PredictedGather gathered = {};
  PredictedLanding landed = {};
  PredictedReduction reduction = {};

  /// Some gradient lands in a backward.
  bool lands() const { return trains && backward.brings_gradients; }
  /// Adds what one beside it brings, whose gradients perhaps land last.
  void join(const PredictedGroup& beside, bool lands_last);
};

/// What is known of a group whose backwards were as `gradients` has seen them.
PredictedGroup predicted_group(const GroupGradients& gradients);

/// Bytes of this rank's part of the group's parameters that train.
int64_t trained_bytes_of(const ParameterGroup& group);

/// Bytes of the parts that a group keeps beside its shard from step to step.
int64_t kept_bytes_of(const ParameterGroup& group);

} // namespace tessera::internal
