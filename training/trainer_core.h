#pragma once

// Internal: the half of a Trainer that does not depend on the type of its batches.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/data/data_source.h>
#include <tessera/training/trainer_events.h>
#include <tessera/training/trainer_options.h>

namespace torch::optim {
class LRScheduler;
} // namespace torch::optim

namespace tessera {
class AveragedModel;
}

namespace tessera::internal {

/// The typed half: a queue of micro-batches, and what is computed of them.
class MicroBatchWork {
 public:
  virtual ~MicroBatchWork() = default;
  virtual bool has_source() const = 0;
  /// Puts the next micro-batch of the source into the queue; false at the end of an epoch.
  virtual bool read() = 0;
  virtual DataPosition position() const = 0;
  virtual void seek(const DataPosition& position) = 0;

  virtual size_t size() const = 0;
  virtual void drop(size_t first) = 0; ///< so many from the front
  /// What a micro-batch of the queue counts; nothing where neither the program nor its type tells.
  virtual std::optional<double> count(size_t index) const = 0;
  virtual std::optional<double> rows(size_t index) const = 0;
  virtual bool has_loss() const = 0;
  virtual Loss loss(size_t index) = 0;
  /// Forward and backward of the first so many, where the program replaces them.
  virtual bool replaces() const = 0;
  virtual Loss run_all(size_t count, const MicroBatchesContext& context) = 0;
};

/// One evaluation, with the types of its batches erased.
struct EvaluationWork {
  std::string name;
  std::function<void()> begin;                  ///< goes to the start of the data
  std::function<bool()> next;                   ///< reads the next batch; false at the end
  std::function<std::optional<double>()> count; ///< of that batch
  std::function<Loss()> loss;                   ///< of that batch
  AveragedModel* average = nullptr;             ///< evaluated in place of the weights
};

struct KeptState {
  std::string name;
  std::function<StateDict()> make;
  std::function<void(const StateDict&)> loaded;
};

/// What a program has told its trainer.
struct TrainerHooks {
  std::vector<torch::optim::LRScheduler*> schedules;
  std::vector<AveragedModel*> averages;
  std::vector<KeptState> kept;
  std::vector<EvaluationWork> evaluations;
  std::function<at::Tensor(double max_norm)> clip;
  std::function<StateDict(StateUse)> state;
  std::vector<std::function<void(const StepEvent&, Control&)>> on_step;
  std::vector<std::function<void(const EvaluationEvent&, Control&)>> on_evaluate;
  std::vector<std::function<void(const SaveEvent&, Control&)>> on_save;
  std::vector<std::function<void(const ResumeEvent&, Control&)>> on_resume;
  std::vector<std::function<void(const StopEvent&)>> on_stop;
};

class TrainerLoop;

class TrainerCore {
 public:
  TrainerCore(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options,
              std::unique_ptr<MicroBatchWork> work);
  ~TrainerCore();
  TrainerCore(TrainerCore&&) noexcept;
  TrainerCore& operator=(TrainerCore&&) noexcept;

  TrainerHooks& hooks();
  StepResult step();        ///< of the source's next micro-batches
  StepResult step_queued(); ///< of what is in the queue
  TrainingEnd run();
  bool resume();
  void save();
  std::vector<EvaluationEvent> evaluate();
  int64_t steps() const;
  const TrainerOptions& options() const;

 private:
  std::unique_ptr<TrainerLoop> loop_;
};

} // namespace tessera::internal
