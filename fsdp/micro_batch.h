#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

namespace internal {
class Schedule;
}

/// What is computed of a micro-batch. The letters are those of torch.distributed.pipelining.
enum class MicroBatchPhase : uint8_t {
  kForward,         ///< F
  kBackward,        ///< B: the gradients of the inputs and of the weights
  kInputGradients,  ///< I: the first half of B, which the stage before waits for
  kWeightGradients, ///< W: the other half
};

/// How long gathered parameters stay in a step of several micro-batches.
enum class Residency : uint8_t {
  kStage,      ///< from their first read to the end of the step: one gather a group and step
  kMicroBatch, ///< to the end of the scope that read them: one gather a group and scope, and what the settings free inside it
};

/// A phase of a micro-batch.
struct MicroBatch {
  int64_t index = 0; ///< counted from 0 in each step
  MicroBatchPhase phase = MicroBatchPhase::kForward;
  /// No other phase of the step follows: the gradients of all micro-batches are reduced in this one. Of B, or of W where the
  /// backward is split; of F without grad mode, where an evaluation ends.
  bool is_last = false;
  Residency residency = Residency::kStage;
};

/// Says which phase of which micro-batch the modules in a module compute while it lives. Use it in a step of several
/// micro-batches, of which some may be in flight: their forward has been, and their backward has not ended. A pipeline opens one
/// around each action of a stage, a gradient accumulation one around each forward and each backward:
///
/// ```cpp
/// for (int64_t i = 0; i < count; ++i) {
///   torch::Tensor loss;
///   {
///     const auto scope = tessera::micro_batch_scope(*model, {.index = i});
///     loss = loss_of(model, batches[i]) / count;
///   }
///   const auto scope =
///       tessera::micro_batch_scope(*model, {.index = i, .phase = MicroBatchPhase::kBackward, .is_last = i + 1 == count});
///   loss.backward();
/// }
/// ```
///
/// It stands in the place of three setters before each backward: `set_requires_gradient_sync(is_last)`,
/// `set_reshard_after_backward(is_last)` with `Residency::kStage`, and `set_reshard_after_forward(false)` likewise. What these
/// have switched off stays so. So there is one reduction a group and step, and each rank keeps whole gradients until then, as in
/// `no_sync`. A strategy that keeps parameters whole (ZeRO-1, ZeRO-2) keeps them under each residency.
///
/// The scope of F gathers the group ahead that the forward before read first, and that of B or I the one that it read last; a
/// phase W gathers nothing ahead, and only what it reads. Where phases follow each other as in the step before, the end of one
/// already does so for the next; `gather_ahead` does for a program that knows what comes next. The end of the last scope reduces
/// what is left, where no backward ran in it. An exception inside the scope of a backward gives up the step: the micro-batches in
/// flight are forgotten, and the gradients that were not reduced are dropped by the next event. One inside a forward's scope
/// gives up that forward.
///
/// Every rank opens the same scopes in the same order. Backwards may come in another order than forwards. An error
///   - while another scope of the model lives, and for a negative index;
///   - of F for a micro-batch that is in flight, and of any other phase for one that is not;
///   - of W before I, and of I or B after I;
///   - of `is_last` in a forward of training, in I, or while other micro-batches are in flight;
///   - for a part of a model that was sharded as a whole.
/// `zero_grad` of the root's handle forgets the micro-batches in flight. It does nothing for modules that were never sharded.
/// (Megatron: `set_current_microbatch`, `no_sync_func`; PyTorch: `backward_maybe_with_nosync`.)
class [[nodiscard]] MicroBatchScope {
 public:
  MicroBatchScope(const torch::nn::Module& module, const MicroBatch& micro_batch);
  ~MicroBatchScope();
  MicroBatchScope(const MicroBatchScope&) = delete;
  MicroBatchScope& operator=(const MicroBatchScope&) = delete;

 private:
  void end(bool has_failed);

  std::vector<std::shared_ptr<internal::Schedule>> schedules_; ///< that have begun the phase
  int exceptions_;                                             ///< that were on their way before
};

/// `const auto scope = tessera::micro_batch_scope(*module, {.index = 2, .phase = tessera::MicroBatchPhase::kBackward});`
inline MicroBatchScope micro_batch_scope(const torch::nn::Module& module, const MicroBatch& micro_batch) {
  return MicroBatchScope(module, micro_batch);
}

/// Starts the gathers for which the next scope of `phase` will wait first, in each model of `module`: of another stage, which
/// has its turn after this one. Every rank calls it at the same point between scopes. Nothing before the first forward, where
/// `set_prefetch_depth(0)` says so, for a model of which a scope lives, and for modules that were never sharded.
void gather_ahead(const torch::nn::Module& module, MicroBatchPhase phase);

} // namespace tessera
