#pragma once

#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/training/lr_schedule.h>
#include <tessera/training/trainer.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "gpt/batches.h"
#include "gpt/context.h"
#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/pipelined.h"
#include "gpt/text.h"

namespace gpt {

/// The main job of one rank: trains, validates, saves, and samples at the end, as the options say. Every rank makes one, with the
/// same options, after `join_job`.
class Training {
 public:
  explicit Training(const Options& options);
  void run();

 private:
  tessera::TrainerOptions trainer_options() const;
  void set_up(tessera::Trainer<Batch>& trainer);
  tessera::Loss loss_of(const Batch& batch);
  torch::nn::Module& module() { return pipeline_ ? pipeline_->module() : *model_; }
  void check_same_flags() const;
  void dump_initial();
  void check_outputs() const;
  void check_checkpoint_folder() const;
  bool writes_samples() const;
  void write_samples();
  void tell_end(const tessera::TrainingEnd& end, double seconds);
  Batch to_device(const Batch& batch) const;

  Options options_;
  Rows rows_;
  Text text_;
  Gpt model_;
  Meshes meshes_;
  torch::Device device_;
  std::optional<PipelinedGpt> pipeline_; // with a dim pp
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<tessera::StepInBackward> stepping_;
  tessera::LRSchedule schedule_;
  int64_t state_bytes_ = 0; // of parameters, gradients and optimizer state of this rank
};

} // namespace gpt
