#pragma once

#include <tessera/checkpoint/state_dict.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/training/grad_scaler.h>

#include <chrono>
#include <filesystem>
#include <optional>

#include "gpt/context.h"
#include "gpt/metrics.h"
#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/pipelined.h"
#include "gpt/progress.h"
#include "gpt/text.h"

namespace gpt {

/// The main job of one rank: trains, validates, saves, and samples at the end, as the options say. Every rank makes one, with the
/// same options, after `join_job`.
class Trainer {
 public:
  explicit Trainer(const Options& options);
  void run();

 private:
  StepMetrics train_step(int64_t step);
  StepMetrics train_step_traced(int64_t step);
  double validate();
  torch::Tensor train_on(const Batch& batch);
  double clip();
  torch::nn::Module& module() { return pipeline_ ? pipeline_->module() : *model_; }
  tessera::StateDict state(bool saves);
  int64_t first_row() const;
  std::filesystem::path checkpoint_folder(int64_t steps_done) const;
  void save(int64_t steps_done);
  void resume();
  tessera::StateDict same_flags(const std::filesystem::path& checkpoint) const;
  void dump_initial();
  void check_outputs() const;
  void check_checkpoint_folder() const;
  bool writes_samples() const;
  void write_samples();
  bool is_to_stop();
  bool first_rank() const;
  Batch to_device(const Batch& batch) const;

  Options options_;
  int64_t rows_; // a rank's rows of a batch
  Text text_;
  Gpt model_;
  Meshes meshes_;
  torch::Device device_;
  std::optional<PipelinedGpt> pipeline_; // with a dim pp
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  tessera::GradScaler scaler_;
  int64_t first_step_ = 0; // steps that the checkpoint had done
  JsonLog log_{"", false}; // the first rank opens it when nothing else can fail: a new training empties it
  Progress progress_;
  std::chrono::steady_clock::time_point start_;
  bool is_terminated_ = false; // by a SIGTERM to some rank
};

} // namespace gpt
