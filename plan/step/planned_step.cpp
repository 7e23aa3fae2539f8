#include <tessera/plan/step/planned_step.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/normal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <tessera/base/meta_memory.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/start/simulated_scope.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/buffers/storage_count.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/optim/step.h>
#include <tessera/parallel/stages/value_tree.h>
#include <tessera/plan/meta_operators.h>
#include <tessera/plan/meter/memory_by_use.h>
#include <tessera/plan/meter/phase.h>
#include <tessera/plan/step/planned_optimizer.h>

namespace tessera::internal {

namespace {

constexpr int kStepsBefore = 3; // the first leaves an order of reads and the optimizer's state; then blocks settle

/// Small numbers, where there is memory for them.
void initialize(torch::nn::Module& module) {
  constexpr double kDeviation = 0.02;
  for (auto& parameter : module.parameters(/*recurse=*/false)) {
    if (parameter.is_floating_point()) parameter.normal_(0, kDeviation);
  }
  for (auto& buffer : module.buffers(/*recurse=*/false)) buffer.zero_();
}

std::string_view name_of(PlanPhase phase) {
  switch (phase) {
    case PlanPhase::kForward: return "forward";
    case PlanPhase::kBackward:
    case PlanPhase::kRecompute: return "backward";
    case PlanPhase::kOptimizer: return "optimizer";
    case PlanPhase::kSetup: break;
  }
  return "setup";
}

int64_t whole_numel(const torch::nn::Module& module) {
  int64_t numel = 0;
  for (const auto& parameter : module.parameters()) numel += parameter.numel();
  return numel;
}

} // namespace

PlannedTraining::PlannedTraining(const PlannedModel& model, const PlanSettings& settings, c10::DeviceType device,
                                 const std::string& folder)
    : model_(model),
      mesh_(settings, device),
      pass_{.rows = settings.rows,
            .recompute = settings.recompute,
            .keeps = settings.keeps,
            .context = mesh_.dim("cp"),
            .context_scheme = settings.context_scheme,
            .context_order = settings.context_order},
      module_(on_meta(model.build)) {
  TORCH_CHECK_VALUE(settings.mesh.cp == 1 || model.splits_sequence, "plan: ", model.name,
                    " does not split its sequences, but cp is ", settings.mesh.cp);
  set_planned_dtype(*module_, planned_dtype(settings));
  convert_planned(*module_, model_, settings);
  shard_planned(*module_, model_, mesh_, planned_options(settings, folder));
  materialize(*module_, device == c10::kMeta ? [](torch::nn::Module&) {} : initialize);
  module_->train();
  optimizer_ = make_planned_optimizer(settings.optimizer, *module_);
}

void PlannedTraining::micro_batch(int64_t index) {
  const auto count = mesh_.settings.accumulation;
  std::optional<NoSync> accumulate; // only the last backward communicates gradients
  if (index + 1 < count) accumulate.emplace(*module_);
  enter_phase(PlanPhase::kForward);
  const auto batch = planned_batch(model_, pass_, mesh_.all.device(), planned_dtype(mesh_.settings));
  auto loss = model_.loss(*module_, batch, pass_);
  if (count > 1) loss = loss / static_cast<double>(count);
  enter_phase(PlanPhase::kBackward);
  loss.backward();
}

void PlannedTraining::step() {
  optimizer_->zero_grad();
  for (int64_t i = 0; i < mesh_.settings.accumulation; ++i) micro_batch(i);
  enter_phase(PlanPhase::kOptimizer);
  if (mesh_.settings.max_grad_norm > 0) clip_grad_norm_(*module_, mesh_.settings.max_grad_norm);
  tessera::step(*optimizer_);
  if (mesh_.settings.float8_gather) precompute_float8_scales(*module_);
}

SimulationOptions simulation_of(const Machine& machine, const PlanSettings& settings) {
  const bool is_cpu = machine.device == Machine::Device::kCpu;
  const double half = machine.bf16_flops > 0 ? machine.bf16_flops : machine.fp32_flops;
  const double float8 = machine.float8_flops > 0 ? machine.float8_flops : is_cpu ? machine.fp32_flops : half;
  const double rate = settings.precision == PlanPrecision::kFp32 ? machine.fp32_flops : half;
  return {
      .flops_per_second = machine.efficiency * rate,
      .attention_flops_per_second = (machine.attention_efficiency > 0 ? machine.attention_efficiency : machine.efficiency) * rate,
      .float8_flops_per_second = machine.efficiency * float8,
      .bytes_per_second = machine.memory_bandwidth,
      .launch_seconds = machine.launch_seconds,
      .dtensor_seconds = machine.dtensor_seconds,
      .host_bytes_per_second = machine.host_bandwidth > 0 ? machine.host_bandwidth : machine.memory_bandwidth,
      .overlaps = !is_cpu,
      .stands_for = is_cpu ? c10::kCPU : c10::kCUDA};
}

int64_t slowest_of_stage(const PlanSettings& settings) {
  return settings.context_order == PartOrder::kContiguous ? (settings.mesh.cp - 1) * settings.mesh.tp : 0;
}

std::unique_ptr<DtypeCopies> dtype_copies_of(const Machine& machine) {
  return machine.device == Machine::Device::kCpu ? std::make_unique<DtypeCopies>() : nullptr;
}

PlanSettings settings_on(const Machine& machine, PlanSettings settings) {
  if (machine.device == Machine::Device::kCpu && settings.offload == OffloadPolicy::Memory::kHost)
    settings.offload = OffloadPolicy::Memory::kDevice;
  return settings;
}

void check_planned(const PlannedModel& model, const Machine& machine, const PlanSettings& settings) {
  TORCH_CHECK_VALUE(model.build && model.batch && model.loss, "plan: ", model.name,
                    " lacks a function: build, batch and loss must be there");
  machine.check();
  settings.check();
  TORCH_CHECK_VALUE(settings.mesh.ranks() == machine.ranks(), "plan: the mesh has ", settings.mesh.ranks(),
                    " ranks, but the machine has ", machine.ranks());
  TORCH_CHECK_VALUE(settings.mesh.pp == 1 || model.layers, "plan: ", model.name, " has no layers for a pipeline, but pp is ",
                    settings.mesh.pp);
}

void take_times(Prediction& prediction) {
  const auto time = simulated_clock().elapsed();
  prediction.seconds = time.total;
  prediction.compute = time.compute;
  prediction.exposed = time.exposed;
  prediction.communication = time.communication;
  prediction.flops = simulated_clock().flops();
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    const auto count = process_context().count(static_cast<CollectiveKind>(kind));
    prediction.bytes_sent += count.bytes;
    prediction.collectives += count.calls;
  }
  prediction.gathers = process_context().count(CollectiveKind::kAllGather).calls;
}

void convert_planned(torch::nn::Module& module, const PlannedModel& model, const PlanSettings& settings) {
  if (settings.float8) convert_to_float8(module, {.scaling = *settings.float8, .except = model.not_in_float8});
}

void set_planned_dtype(torch::nn::Module& module, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    if (parameter.is_floating_point()) parameter.set_data(parameter.to(dtype));
  }
}

PipelineValue planned_batch(const PlannedModel& model, const PassSettings& pass, at::Device device, at::ScalarType dtype) {
  auto batch = model.batch(pass, device);
  if (dtype != at::kBFloat16) return batch;
  return pipeline::with_tensors(batch, [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_floating_point() ? tensor.to(at::kBFloat16) : tensor;
  });
}

void take_memory(Prediction& prediction, const Machine& machine, const torch::nn::Module& module,
                 const std::vector<MetaMemory::Event>& events, size_t begin) {
  constexpr int64_t kCudaBlock = 512; // bytes that CUDA's caching allocator rounds up to
  StorageCount buffers;
  for (const auto& buffer : module.buffers()) buffers.add(buffer);
  const bool is_cpu = machine.device == Machine::Device::kCpu;
  const auto offload = prediction.settings.offload;
  const bool is_host_device = is_cpu && offload == OffloadPolicy::Memory::kHost;
  const auto measured = memory_by_use(events, {.begin = begin,
                                               .buffers = buffers.bytes(),
                                               .is_offloaded = offload != OffloadPolicy::Memory::kDevice && !is_host_device,
                                               .granularity = is_cpu ? 1 : kCudaBlock});
  prediction.memory = measured.at_peak;
  prediction.peak_phase = name_of(measured.peak_phase);
  const auto peak_of = [&](PlanPhase phase) { return measured.peak_of_phase[static_cast<size_t>(phase)]; };
  prediction.forward_peak = peak_of(PlanPhase::kForward);
  prediction.backward_peak = std::max(peak_of(PlanPhase::kBackward), peak_of(PlanPhase::kRecompute));
  prediction.optimizer_peak = peak_of(PlanPhase::kOptimizer);
  prediction.host_bytes = measured.host_bytes;
}

Prediction predict_flat(const PlannedModel& model, const Machine& machine, const PlanSettings& settings) {
  const bool is_cpu = machine.device == Machine::Device::kCpu;
  const SimulatedScope rank(machine.topology(), static_cast<int>(slowest_of_stage(settings)), simulation_of(machine, settings));
  const MetaOperatorsOf kernels(is_cpu ? c10::kCPU : c10::kCUDA);
  enter_phase(PlanPhase::kSetup);
  const MetaMemory memory(phase_now);
  const auto copies = dtype_copies_of(machine);
  PlannedTraining training(model, settings_on(machine, settings), c10::kMeta);
  for (int i = 0; i < kStepsBefore; ++i) training.step();
  Prediction prediction{.settings = settings, .model = model.name, .parameters = whole_numel(training.module())};
  process_context().reset_counters();
  simulated_clock().reset();
  const auto begin = memory.count();
  training.step();
  take_times(prediction);
  take_memory(prediction, machine, training.module(), memory.events(), begin);
  enter_phase(PlanPhase::kSetup);
  return prediction;
}

} // namespace tessera::internal
