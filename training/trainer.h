#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <tessera/data/data_source.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/batch_count.h>
#include <tessera/training/trainer_core.h>
#include <tessera/training/trainer_events.h>
#include <tessera/training/trainer_options.h>

namespace tessera {

namespace internal {

template <typename Batch>
struct TypedWork final : MicroBatchWork {
  std::function<Loss(const Batch&)> loss_of;
  std::function<double(const Batch&)> counts, row_counts;
  std::function<Loss(std::span<const Batch>, const MicroBatchesContext&)> all_of;
  std::optional<DataSource<Batch>> source;
  std::vector<Batch> queue;

  bool has_source() const override { return source.has_value(); }
  bool read() override {
    auto batch = source->next();
    if (batch) queue.push_back(std::move(*batch));
    return batch.has_value();
  }
  DataPosition position() const override { return source->position(); }
  void seek(const DataPosition& position) override {
    queue.clear();
    source->seek(position);
  }
  size_t size() const override { return queue.size(); }
  void drop(size_t first) override { queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(first)); }
  std::optional<double> count(size_t index) const override {
    return counts ? std::optional(counts(queue[index])) : tessera::count_of(queue[index]);
  }
  std::optional<double> rows(size_t index) const override {
    return row_counts ? std::optional(row_counts(queue[index])) : tessera::rows_of(queue[index]);
  }
  bool has_loss() const override { return static_cast<bool>(loss_of); }
  Loss loss(size_t index) override { return loss_of(queue[index]); }
  bool replaces() const override { return static_cast<bool>(all_of); }
  Loss run_all(size_t count, const MicroBatchesContext& context) override {
    return all_of(std::span<const Batch>(queue).first(count), context);
  }
};

} // namespace internal

/// Trains a module: micro-batches, exact losses, clipping, schedules, averages, evaluations, checkpoints, and their resume.
///
/// ```cpp
/// tessera::Trainer<Tokens> trainer(*gpt, optimizer, {.micro_batches = 4, .max_grad_norm = 1, .stop_after = {.steps = 1000}});
/// trainer.loss([&](const Tokens& batch) { return tessera::LossSum{losses_of(gpt, batch).sum(), batch.counted()}; });
/// trainer.data(TokenFile("train.bin", rows));
/// const auto end = trainer.run();
/// ```
///
/// A step reads the micro-batches, computes forward and backward of each, clips, steps the optimizer or leaves the step out,
/// steps the schedule, updates the averages, and calls the events' functions. Gradients are reduced once a step; they are
/// averaged over the ranks of `TrainerOptions::data_mesh`, as `fully_shard` and `replicate` do, and the losses are scaled so that
/// they are those of the mean over all terms of all ranks and micro-batches. `tessera::manual_seed` seeds the random numbers of
/// each step.
///
/// Every rank of `TrainerOptions::mesh` makes one alike, with functions that do the same, and calls it alike. Two small
/// all-reduces a step make each decision common to all ranks. What a data source, a count or an event's function throws on one
/// rank is an error on every rank that names the rank: at once, or for an event's function in the next call (a step, a save, the
/// end of `run`). What a loss function throws ends that rank; the others hear from the library that it has ended. After an error
/// a trainer cannot be used any more; after one within a step, which may have left gradients, each call is an error.
///
/// Module, optimizer, schedules and averages must outlive it. It is destroyed before `destroy_process_group`.
template <typename Batch>
class Trainer {
 public:
  /// An error for options that mean nothing, on every rank, before anything is communicated.
  Trainer(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options = {})
      : Trainer(module, optimizer, std::move(options), std::make_unique<internal::TypedWork<Batch>>()) {}

  /// The loss of a micro-batch, in training mode and, where an evaluation has no other, without gradients.
  Trainer& loss(std::function<Loss(const Batch&)> loss) { return set(work_->loss_of, std::move(loss)); }
  /// How many terms the loss of a batch has, before its forward: tokens whose target counts. Without it `count_of`.
  Trainer& count(std::function<double(const Batch&)> count) { return set(work_->counts, std::move(count)); }
  /// How many rows a batch has. Without it `rows_of`, or where the type does not tell, the count.
  Trainer& rows(std::function<double(const Batch&)> rows) { return set(work_->row_counts, std::move(rows)); }
  /// Sets where micro-batches come from.
  Trainer& data(DataSource<Batch> source) {
    work_->source.emplace(std::move(source));
    return *this;
  }
  /// Replaces "forward and backward of each micro-batch", for a pipeline. The function leaves the gradients in `grad()`, of
  /// the losses' sum divided by `MicroBatchesContext::count`, and returns the loss of all of them: this rank's, or, the same on
  /// all ranks, that of all.
  Trainer& micro_batches(std::function<Loss(std::span<const Batch>, const MicroBatchesContext&)> run) {
    return set(work_->all_of, std::move(run));
  }
  /// Replaces `clip_grad_norm_` of the module. The function clips to a norm, which is infinite without clipping, and returns the
  /// norm before.
  Trainer& clip(std::function<at::Tensor(double max_norm)> clip) { return set(core_.hooks().clip, std::move(clip)); }
  /// Replaces `state_dict(module, optimizer)`.
  Trainer& state(std::function<StateDict(StateUse)> state) { return set(core_.hooks().state, std::move(state)); }

  /// Steps after each step of the optimizer. Its state is in the checkpoints; those of several have the names "lr_schedule",
  /// "lr_schedule_1" and so on.
  Trainer& schedule(torch::optim::LRScheduler& schedule) { return append(core_.hooks().schedules, &schedule); }
  /// Updated after each step of the optimizer. Its state is in the checkpoints.
  Trainer& average(AveragedModel& average) { return append(core_.hooks().averages, &average); }
  /// More state that a checkpoint holds, made anew for each save and load. After a load `loaded` gets all that was read.
  Trainer& keep(std::string name, std::function<StateDict()> make, std::function<void(const StateDict&)> loaded = nullptr) {
    return append(core_.hooks().kept, {std::move(name), std::move(make), std::move(loaded)});
  }

  /// An evaluation over an epoch of `source`: `loss` unset is that of the training; with an `average`, its weights are evaluated.
  /// Modules are in evaluation mode. All ranks get equally many batches.
  Trainer& evaluate(const std::string& name, DataSource<Batch> source, std::function<Loss(const Batch&)> loss = nullptr,
                    AveragedModel* average = nullptr);

  /// Functions that are called on every rank, in the order in which they were added.
  Trainer& on_step(std::function<void(const StepEvent&, Control&)> call) {
    return append(core_.hooks().on_step, std::move(call));
  }
  Trainer& on_evaluate(std::function<void(const EvaluationEvent&, Control&)> call) {
    return append(core_.hooks().on_evaluate, std::move(call));
  }
  Trainer& on_save(std::function<void(const SaveEvent&, Control&)> call) {
    return append(core_.hooks().on_save, std::move(call));
  }
  Trainer& on_resume(std::function<void(const ResumeEvent&, Control&)> call) {
    return append(core_.hooks().on_resume, std::move(call));
  }
  Trainer& on_stop(std::function<void(const StopEvent&)> call) { return append(core_.hooks().on_stop, std::move(call)); }

  /// One step of the source's next micro-batches; at the end of an epoch the first of the next one. Nothing is saved, evaluated
  /// or logged, whatever the options or an event's function ask for, and signals are not looked at.
  StepResult step() { return core_.step(); }
  /// Does the same with these micro-batches, for a loop that reads its data itself. Every rank gives equally many.
  StepResult step(std::vector<Batch> micro_batches) {
    TORCH_CHECK_VALUE(!work_->has_source(), "Trainer: step(micro_batches) is for a trainer without data()");
    work_->queue = std::move(micro_batches);
    return core_.step_queued();
  }
  /// Resumes, then trains until there is a reason to stop, saves, and says the reason. SIGTERM ends it after the step (or
  /// between two batches of an evaluation) with a checkpoint; a second one ends the process at once. SIGUSR2 saves.
  TrainingEnd run() { return core_.run(); }

  /// Goes on from the newest checkpoint in `SaveOptions::folder`. Whether there is one. `run` does it where it was not done.
  bool resume() { return core_.resume(); }
  /// Saves `<folder>/step-<steps>`; returns when it is complete.
  void save() { core_.save(); }
  /// Runs all evaluations now.
  std::vector<EvaluationEvent> evaluate_now() { return core_.evaluate(); }

  int64_t steps() const { return core_.steps(); } ///< done, those before a resume too
  const TrainerOptions& options() const { return core_.options(); }

 private:
  Trainer(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options,
          std::unique_ptr<internal::TypedWork<Batch>> work)
      : work_(work.get()), core_(module, optimizer, std::move(options), std::move(work)) {}

  template <typename Function>
  Trainer& set(Function& slot, Function function) {
    TORCH_CHECK_VALUE(function, "Trainer: the function is empty");
    slot = std::move(function);
    return *this;
  }
  template <typename T>
  Trainer& append(std::vector<T>& list, std::type_identity_t<T> item) {
    list.push_back(std::move(item));
    return *this;
  }

  internal::TypedWork<Batch>* work_; // the core's
  internal::TrainerCore core_;
};

template <typename Batch>
Trainer<Batch>& Trainer<Batch>::evaluate(const std::string& name, DataSource<Batch> source,
                                         std::function<Loss(const Batch&)> loss, AveragedModel* average) {
  struct Data {
    DataSource<Batch> source;
    std::function<Loss(const Batch&)> loss;
    std::optional<Batch> batch;
  };
  const auto data = std::make_shared<Data>(Data{std::move(source), std::move(loss), std::nullopt});
  const auto* work = work_;
  return append(
      core_.hooks().evaluations,
      {.name = name,
       .begin = [data] { data->source.seek({}); },
       .next =
           [data] {
             data->batch = data->source.next();
             return data->batch.has_value();
           },
       .count = [data, work] { return work->counts ? std::optional(work->counts(*data->batch)) : count_of(*data->batch); },
       .loss =
           [data, work] {
             const auto& loss_of = data->loss ? data->loss : work->loss_of;
             TORCH_CHECK_VALUE(loss_of, "Trainer: an evaluation has no loss, and the training neither");
             return loss_of(*data->batch);
           },
       .average = average});
}

} // namespace tessera
