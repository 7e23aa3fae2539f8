#pragma once

// Internal: a training of a planned model, as this rank runs it.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/base/meta_memory.h>
#include <tessera/collectives/simulated_time.h>
#include <tessera/plan/machine.h>
#include <tessera/plan/meter/dtype_copies.h>
#include <tessera/plan/planned_model.h>
#include <tessera/plan/prediction.h>
#include <tessera/plan/settings.h>
#include <tessera/plan/step/planned_mesh.h>

namespace tessera::internal {

/// A model that is sharded as the settings say, and its optimizer, on the ranks of the process group: those of a simulated one on
/// the meta device, or real ones on theirs. No pipeline. Every rank makes it.
class PlannedTraining {
 public:
  /// `folder` is that of an offload to files.
  PlannedTraining(const PlannedModel& model, const PlanSettings& settings, c10::DeviceType device,
                  const std::string& folder = {});
  PlannedTraining(const PlannedTraining&) = delete;
  PlannedTraining& operator=(const PlannedTraining&) = delete;
  ~PlannedTraining() = default;

  /// All micro-batches, clipping, and the optimizer's step. Its phases are those of `phase_now`.
  void step();
  torch::nn::Module& module() { return *module_; }

 private:
  void micro_batch(int64_t index);

  PlannedModel model_;
  PlannedMesh mesh_;
  PassSettings pass_;
  std::shared_ptr<torch::nn::Module> module_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// How a simulated rank of the machine computes under the settings.
SimulationOptions simulation_of(const Machine& machine, const PlanSettings& settings);
/// Returns which of the ranks of a stage, by their order, computes most: the first of those that are alike.
int64_t slowest_of_stage(const PlanSettings& settings);
/// Counts the copies that operators on several dtypes make, on a machine that makes them, for as long as it lives.
std::unique_ptr<DtypeCopies> dtype_copies_of(const Machine& machine);
/// The settings as they are there: a CPU's memory is its host's, so that an offload to the host changes nothing.
PlanSettings settings_on(const Machine& machine, PlanSettings settings);
/// Throws unless the settings are possible, and of the machine's ranks.
void check_planned(const PlannedModel& model, const Machine& machine, const PlanSettings& settings);
/// Makes linear layers of the model multiply in fp8 where the settings say so.
void convert_planned(torch::nn::Module& module, const PlannedModel& model, const PlanSettings& settings);
/// Brings the floating-point parameters to `dtype`, before they are sharded.
void set_planned_dtype(torch::nn::Module& module, at::ScalarType dtype);
/// A batch whose floating-point tensors, as of pictures, have `dtype` where that is bf16.
PipelineValue planned_batch(const PlannedModel& model, const PassSettings& pass, at::Device device, at::ScalarType dtype);
/// What the rank held from event `begin` on.
void take_memory(Prediction& prediction, const Machine& machine, const torch::nn::Module& module,
                 const std::vector<MetaMemory::Event>& events, size_t begin);
/// What the clock and the counters of this simulated rank have of a step.
void take_times(Prediction& prediction);

/// Stages that a rank of the pipeline has.
int64_t chunks_of(const PlanSettings& settings);
/// A prediction without and with a pipeline.
Prediction predict_flat(const PlannedModel& model, const Machine& machine, const PlanSettings& settings);
Prediction predict_pipeline(const PlannedModel& model, const Machine& machine, const PlanSettings& settings);

} // namespace tessera::internal
