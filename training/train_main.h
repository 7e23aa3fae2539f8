#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/data/row_source.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/training/train_config.h>
#include <tessera/training/trainer.h>

namespace tessera {

/// What `train_main` gives a program: the settings of its config, and its place in the job.
class TrainSetup {
 public:
  /// Every rank makes one alike, after `init_process_group`. An error where the config's mesh has another number of ranks.
  TrainSetup(TrainConfig config, c10::DeviceType device, std::vector<std::string> arguments = {});

  const TrainConfig& config() const { return config_; }
  const DeviceMesh& mesh() const { return mesh_; }                  ///< all ranks, in the config's dims
  DeviceMesh data_mesh() const { return config_.data_mesh(mesh_); } ///< the ranks with different rows
  c10::Device device() const { return mesh_.device(); }
  /// The words of the command line that `train_main` has no meaning for.
  const std::vector<std::string>& arguments() const { return arguments_; }
  /// The program's own settings in the block "tessera": see `TrainConfig::own`.
  template <typename Options>
  Options own(const std::string& name) const {
    return config_.own<Options>(name);
  }

  /// What a `RowSource` takes: the config's micro-batch and seed. The last step of an epoch repeats rows where the ranks do not
  /// divide their number (`LastRows::kRepeat`); with `kUneven` that step is the same on any number of ranks.
  RowOptions rows() const;
  /// An evaluation takes the rows in the order of the data, and each of them once.
  RowOptions rows_to_evaluate() const;

  /// Brings the parameters to the config's dtype, splits layers over a dim tp, and shards each of `blocks` and then the rest of
  /// `model`, as the config says. Every rank calls it. An error where the config has a dim pp: a pipeline is the program's.
  void shard(torch::nn::Module& model, const std::vector<std::shared_ptr<torch::nn::Module>>& blocks = {}) const;
  /// The modules of type `Block` in `model`, for `shard`.
  template <typename Block>
  static std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const torch::nn::Module& model) {
    std::vector<std::shared_ptr<torch::nn::Module>> found;
    for (const auto& module : model.modules(/*include_self=*/false)) {
      if (std::dynamic_pointer_cast<Block>(module)) found.push_back(module);
    }
    return found;
  }

  /// The config's optimizer, and the schedule that steps with it: both live as long as this. An error where the config has no
  /// optimizer.
  torch::optim::Optimizer& make_optimizer(const torch::nn::Module& model);
  /// A Trainer of the config, with its schedule, for `optimizer`: that of `make_optimizer`, or, where the config has none, the
  /// program's own.
  template <typename Batch>
  Trainer<Batch> trainer(torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
    check_optimizer(optimizer);
    Trainer<Batch> made(model, optimizer, config_.trainer_options(mesh_));
    if (auto* const schedule = make_schedule(optimizer)) made.schedule(*schedule);
    return made;
  }

 private:
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;
  torch::optim::LRScheduler* make_schedule(torch::optim::Optimizer& optimizer); ///< null where the config has none

  TrainConfig config_;
  DeviceMesh mesh_;
  std::vector<std::string> arguments_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<torch::optim::LRScheduler> schedule_;
};

/// A whole program: `return tessera::train_main(argc, argv, [](tessera::TrainSetup& setup) { … return trainer.run(); });`.
///
///   --config FILE      DeepSpeed's JSON (docs/from_deepspeed.md); also --deepspeed and --deepspeed_config
///   --ranks N          starts N local ranks; without it the environment says what rank this process is (torchrun, Slurm, mpirun)
///   --max-restarts N   with --ranks: starts them again after a failure, which is printed to stderr; they go on from the newest
///                      checkpoint
///   --min-ranks N      each restart has a rank fewer, but at least N
///   --device NAME      cpu (the default) or cuda
///   --help             what this says
///
/// Reads the config, joins the job, calls `train` on every rank, and leaves the job. The first rank prints the config's notes on
/// standard error. Returns the status for `main`: 0; 143 after a SIGTERM, when the training has saved; 1 after an error, whose
/// text goes to standard error and to `record_error`; 2 for a command line that means nothing.
int train_main(int argc, char** argv, const std::function<TrainingEnd(TrainSetup&)>& train) noexcept;

} // namespace tessera
