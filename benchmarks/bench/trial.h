#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/benchmarks/bench.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/optim/optimizer.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory_meter.h"
#include "settings.h"

namespace tessera::benchmarks {

/// The model of a case, sharded as its settings say. Every rank makes one, after `join_job`.
class Trial {
 public:
  /// `folder` exists, and is the same on all ranks. `meter` counts from before.
  Trial(const Settings& settings, const BenchRecipe& recipe, std::filesystem::path folder, const MemoryMeter& meter);

  /// One run of what the case measures. `prepare` comes before each, and is not timed.
  void prepare();
  void run(const std::function<void(const char* part)>& observe = [](const char*) {});

  /// Throws c10::Error where what is measured gives another result than it must. Every rank calls it, once.
  void verify();

  /// What the groups did since the last call.
  StepReport report() { return has_model() ? fsdp(module()).report() : StepReport(); }
  int64_t items() const;
  int64_t state_bytes() const;
  int64_t parameter_count() const;
  /// What a forward of the unsharded model left for its backward; 0 where none was run.
  int64_t activation_bytes() const { return activation_bytes_; }
  /// Of the last step's rows of this rank.
  double loss() const;
  torch::nn::Module& module() { return *model_.module; }
  /// Whether the model is a part of what is measured.
  bool has_model() const { return settings_.measure != "redistribution"; }

 private:
  void make_source();
  void shard();
  void step(const std::function<void(const char*)>& observe);
  void take_step() {
    step([](const char*) {});
  }
  at::Tensor forward() const;
  /// Of the unsharded model on the rows of all ranks, one after another.
  at::Tensor reference_gradient(const MemoryMeter& meter);
  void verify_gradient();
  double coded_error() const;
  void verify_gather();
  void verify_load();

  Settings settings_;
  const BenchRecipe& recipe_;
  std::filesystem::path folder_;
  DeviceMesh mesh_;
  BenchModel model_;
  std::vector<at::Tensor> batch_;
  int64_t next_step_ = 0;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  at::Tensor reference_, loss_, source_;
  int64_t activation_bytes_ = 0;
};

} // namespace tessera::benchmarks
