// A step of a pipeline: each rank performs the actions of its schedule alone, with what the others would send, and the schedule's
// simulation puts the times together.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <tessera/base/meta_memory.h>
#include <tessera/collectives/backends/simulated/cost.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/start/simulated_scope.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/optim/step.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline/dependencies.h>
#include <tessera/parallel/run/sharded_stage.h>
#include <tessera/parallel/run/stage_run.h>
#include <tessera/plan/meta_operators.h>
#include <tessera/plan/meter/memory_by_use.h>
#include <tessera/plan/meter/phase.h>
#include <tessera/plan/step/planned_optimizer.h>
#include <tessera/plan/step/planned_step.h>

namespace tessera::internal {

namespace {

using pipeline::ShardedStage, pipeline::StageRun;

constexpr int kPipelineStepsBefore = 2;

PipelineSchedule schedule_of(const PlanSettings& settings) {
  auto schedule = pipeline_schedule(
      settings.schedule, {.ranks = settings.mesh.pp, .micro_batches = settings.accumulation, .chunks = chunks_of(settings)});
  return settings.resident_stages > 0 ? with_residency(std::move(schedule), settings.resident_stages) : schedule;
}

/// What each layer gives to the next, of the whole model in the dtype in which it computes.
std::vector<PipelineValue> outputs_of_layers(const PlannedModel& model, const PlannedMesh& mesh, const PassSettings& pass) {
  const at::NoGradGuard no_grad;
  const auto module = on_meta(model.build);
  const auto& settings = mesh.settings;
  const auto dtype = settings.precision == PlanPrecision::kFp32 ? at::kFloat : at::kBFloat16;
  set_planned_dtype(*module, dtype);
  if (settings.mesh.tp > 1)
    parallelize(*module, mesh.dim("tp"),
                model.tensor_parallel(*module, {.ranks = settings.mesh.tp, .sequence = settings.sequence_parallel}));
  const auto batch = planned_batch(model, pass, mesh.all.device(), dtype);
  auto value = batch;
  std::vector<PipelineValue> outputs;
  const auto layers = model.layers(*module, pass);
  for (const auto& layer : layers.layers()) outputs.push_back(value = layer.function(value, batch));
  return outputs;
}

int64_t bytes_of_message(const PipelineValue& value) {
  int64_t bytes = 0;
  for (const auto& tensor : pipeline::tensors_of(value)) {
    if (tensor.defined()) bytes += static_cast<int64_t>((is_dtensor(tensor) ? to_local(tensor) : tensor).nbytes());
  }
  return bytes;
}

/// Seconds of the actions of a stage, in the mean over its micro-batches.
struct StageSeconds {
  double forward = 0, input_gradients = 0, weight_gradients = 0; ///< a backward in one piece counts as the first of the two
};

struct RankStep {
  Prediction prediction; ///< of the rank's memory and traffic
  std::map<int64_t, StageSeconds> stages;
  double after = 0; ///< of the optimizer and the clipping
  std::vector<int64_t> bounds;
  std::vector<double> costs;
  double message = 0;
};

/// One rank of a pipeline, with the real stages and nobody else.
class PipelineRank {
 public:
  PipelineRank(const PlannedModel& model, const PlanSettings& settings, const PipelineSchedule& schedule)
      : model_(model),
        schedule_(schedule),
        mesh_(settings, c10::kMeta),
        pass_{.rows = settings.rows,
              .recompute = settings.recompute,
              .keeps = settings.keeps,
              .context = mesh_.dim("cp"),
              .context_scheme = settings.context_scheme,
              .context_order = settings.context_order},
        between_(outputs_of_layers(model, mesh_, pass_)) {}

  void make() {
    module_ = on_meta(model_.build);
    const auto& settings = mesh_.settings;
    set_planned_dtype(*module_, planned_dtype(settings));
    convert_planned(*module_, model_, settings);
    // The ranks compare what they were given on the host, where their numbers are.
    const auto host = init_device_mesh(c10::kCPU, mesh_.all.shape(), mesh_.all.dim_names());
    stages_.emplace(split(model_.layers(*module_, pass_), host["pp"], {.rank_of_stage = schedule_.rank_of_stage}));
    shard_planned(*stages_, *module_, model_, mesh_, planned_options(settings));
    materialize(*stages_->module, [](torch::nn::Module&) {});
    for (const auto& stage : stages_->local) sharded_.emplace_back(*stages_, stage, Residency::kStage);
    optimizer_ = make_planned_optimizer(settings.optimizer, *stages_->module);
  }

  /// Adds up the seconds of each action.
  void step(std::map<int64_t, StageSeconds>& seconds, double& after) {
    optimizer_->zero_grad();
    runs_.clear();
    for (const auto& stage : stages_->local) runs_.emplace_back(*stages_, stage, pipeline::LayerSeeds{});
    const auto& actions = schedule_.actions[static_cast<size_t>(stages_->rank())];
    count_backwards(actions);
    for (const auto& action : actions) {
      const double begin = simulated_clock().elapsed().total;
      if (action.work == PipelineWork::kUnshard) gather_ahead(action);
      perform(action);
      const double took = (simulated_clock().elapsed().total - begin) / static_cast<double>(schedule_.micro_batches);
      auto& stage = seconds[action.stage];
      if (action.work == PipelineWork::kForward) stage.forward += took;
      if (action.work == PipelineWork::kWeightGradients) stage.weight_gradients += took;
      if (action.work == PipelineWork::kBackward || action.work == PipelineWork::kInputGradients) stage.input_gradients += took;
    }
    const double begin = simulated_clock().elapsed().total;
    enter_phase(PlanPhase::kOptimizer);
    const auto limit = mesh_.settings.max_grad_norm;
    if (limit > 0) clip_grad_norm_(stages_->module->parameters(), limit);
    tessera::step(*optimizer_);
    if (mesh_.settings.float8_gather) precompute_float8_scales(*stages_->module);
    after += simulated_clock().elapsed().total - begin;
  }

  const PipelineStages& stages() const { return *stages_; }
  /// The largest message of the pipeline's stages.
  int64_t message_bytes() const {
    int64_t largest = 0;
    for (size_t stage = 1; stage + 1 < stages_->bounds.size(); ++stage)
      largest = std::max(largest, bytes_of_message(between_[static_cast<size_t>(stages_->bounds[stage] - 1)]));
    return largest;
  }

 private:
  void count_backwards(const std::vector<PipelineAction>& actions) {
    remaining_.clear();
    for (const auto& action : actions) {
      if (ends(action.work)) ++remaining_[sharded_of(action.stage).root().get()];
      if (action.work == PipelineWork::kInputGradients) split_.emplace(action.stage, action.micro_batch);
    }
  }
  static bool ends(PipelineWork work) { return work == PipelineWork::kBackward || work == PipelineWork::kWeightGradients; }

  void perform(const PipelineAction& action) {
    switch (action.work) {
      case PipelineWork::kForward: return forward(action);
      case PipelineWork::kBackward:
      case PipelineWork::kInputGradients:
      case PipelineWork::kWeightGradients: return backward(action);
      case PipelineWork::kUnshard: return;
      case PipelineWork::kReshard: return sharded_of(action.stage).free();
    }
  }

  /// As the pipeline does: the first gathers of the stage start with this action of the schedule.
  void gather_ahead(const PipelineAction& gather) const {
    const auto& actions = schedule_.actions[static_cast<size_t>(stages_->rank())];
    const auto* const end = actions.data() + actions.size();
    const auto* const next = std::find_if(
        &gather, end, [&](const auto& action) { return action.stage == gather.stage && pipeline::computes(action.work); });
    if (next != end) sharded_of(gather.stage).gather_ahead(next->work);
  }

  void forward(const PipelineAction& action) {
    enter_phase(PlanPhase::kForward);
    auto& run = run_of(action.stage);
    const auto batch = planned_batch(model_, pass_, mesh_.all.device(), planned_dtype(mesh_.settings));
    const auto input = action.stage == 0 ? batch : received(run.stage().begin - 1);
    const auto scope = sharded_of(action.stage).enter(action.work, action.micro_batch, /*is_last=*/false);
    const auto output = run.forward(action.micro_batch, input, batch, split_.contains({action.stage, action.micro_batch}));
    if (!is_last(action.stage)) return run.keep_graph(action.micro_batch, pipeline::tensors_of(output));
    const auto loss = model_.pipeline_loss.sum(output, batch) / static_cast<double>(schedule_.micro_batches);
    run.keep_graph(action.micro_batch, {loss});
    loss_like_ = loss.detach();
  }

  void backward(const PipelineAction& action) {
    enter_phase(PlanPhase::kBackward);
    auto& run = run_of(action.stage);
    const auto& sharded = sharded_of(action.stage);
    const bool completes = ends(action.work) && --remaining_.at(sharded.root().get()) == 0;
    const auto scope = sharded.enter(action.work, action.micro_batch, completes);
    if (action.work == PipelineWork::kWeightGradients) return run.weight_gradients(action.micro_batch);
    std::vector<at::Tensor> gradients;
    if (is_last(action.stage)) {
      gradients.push_back(at::ones_like(loss_like_));
    } else {
      for (const auto& each : pipeline::tensors_of(between_[static_cast<size_t>(run.stage().end - 1)])) {
        if (each.defined() && each.is_floating_point()) gradients.push_back(at::empty_like(each));
      }
    }
    run.backward(action.micro_batch, gradients);
  }

  /// What layer `layer` gave, as it comes from another rank.
  PipelineValue received(int64_t layer) const {
    return pipeline::with_tensors(between_[static_cast<size_t>(layer)], [](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return at::empty_like(tensor).requires_grad_(tensor.is_floating_point());
    });
  }

  bool is_last(int64_t stage) const { return stage + 1 == stages_->count(); }
  StageRun& run_of(int64_t stage) {
    return *std::find_if(runs_.begin(), runs_.end(), [&](const auto& run) { return run.stage().index == stage; });
  }
  const ShardedStage& sharded_of(int64_t stage) const {
    const auto found =
        std::find_if(stages_->local.begin(), stages_->local.end(), [&](const auto& each) { return each.index == stage; });
    return sharded_[static_cast<size_t>(found - stages_->local.begin())];
  }

  const PlannedModel& model_;
  const PipelineSchedule& schedule_;
  PlannedMesh mesh_;
  PassSettings pass_;
  std::vector<PipelineValue> between_; ///< by layer
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<PipelineStages> stages_;
  std::vector<ShardedStage> sharded_;
  std::vector<StageRun> runs_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::map<const torch::nn::Module*, int64_t> remaining_; ///< backwards, and second halves
  std::set<std::pair<int64_t, int64_t>> split_;           ///< stages and micro-batches whose backward comes in two halves
  at::Tensor loss_like_;
};

/// Seconds of a message between neighbours of a pipeline.
double message_seconds(const Machine& machine, const PlanSettings& settings, int64_t bytes) {
  const auto topology = machine.topology();
  const auto next = machine.ranks() / settings.mesh.pp;
  double seconds = 0;
  for (const auto& phase : phases_of(CollectiveKind::kSend, bytes, GroupShape::of({0, next}, topology), topology))
    seconds += phase.latency + phase.transfer;
  return seconds;
}

RankStep step_of_rank(const PlannedModel& model, const Machine& machine, const PlanSettings& settings,
                      const PipelineSchedule& schedule, int64_t pipeline_rank) {
  const auto rank = static_cast<int>(pipeline_rank * machine.ranks() / settings.mesh.pp + slowest_of_stage(settings));
  const SimulatedScope scope(machine.topology(), rank, simulation_of(machine, settings));
  const MetaOperatorsOf kernels(machine.device == Machine::Device::kCpu ? c10::kCPU : c10::kCUDA);
  enter_phase(PlanPhase::kSetup);
  PipelineRank run(model, settings_on(machine, settings), schedule);
  const MetaMemory memory(phase_now);
  const auto copies = dtype_copies_of(machine);
  run.make();
  RankStep result{.prediction = {.settings = settings, .model = model.name}};
  for (int i = 0; i < kPipelineStepsBefore; ++i) {
    std::map<int64_t, StageSeconds> ignored;
    double after = 0;
    run.step(ignored, after);
  }
  process_context().reset_counters();
  simulated_clock().reset();
  const auto begin = memory.count();
  run.step(result.stages, result.after);
  take_times(result.prediction);
  take_memory(result.prediction, machine, *run.stages().module, memory.events(), begin);
  result.bounds = run.stages().bounds;
  result.costs = run.stages().costs;
  result.message = message_seconds(machine, settings, run.message_bytes());
  enter_phase(PlanPhase::kSetup);
  return result;
}

/// Two ranks whose stages look alike take as long. The first of them holds most micro-batches in flight.
std::vector<std::pair<int64_t, double>> looks_of(const RankStep& any, const PipelineSchedule& schedule, int64_t rank) {
  std::vector<std::pair<int64_t, double>> looks;
  for (size_t stage = 0; stage < schedule.rank_of_stage.size(); ++stage) {
    if (schedule.rank_of_stage[stage] == rank) looks.emplace_back(any.bounds[stage + 1] - any.bounds[stage], any.costs[stage]);
  }
  return looks;
}

std::vector<RankStep> steps_of_ranks(const PlannedModel& model, const Machine& machine, const PlanSettings& settings,
                                     const PipelineSchedule& schedule) {
  std::map<std::vector<std::pair<int64_t, double>>, std::vector<StageSeconds>> known;
  std::vector<RankStep> steps{step_of_rank(model, machine, settings, schedule, 0)};
  for (int64_t rank = 1; rank < schedule.ranks(); ++rank) {
    const auto looks = looks_of(steps[0], schedule, rank);
    if (const auto found = known.find(looks); found != known.end() && rank + 1 < schedule.ranks()) {
      size_t next = 0; // the stages of the rank in their order, as of the one that looks alike
      for (size_t stage = 0; stage < schedule.rank_of_stage.size(); ++stage) {
        if (schedule.rank_of_stage[stage] == rank) steps[0].stages[static_cast<int64_t>(stage)] = found->second[next++];
      }
      continue;
    }
    steps.push_back(step_of_rank(model, machine, settings, schedule, rank));
    auto& seconds = known[looks];
    for (const auto& [stage, each] : steps.back().stages) seconds.push_back(each);
  }
  return steps;
}

/// The schedule's simulation with the measured times of its stages.
PipelineSimulation simulation_of(const PipelineSchedule& schedule, const std::map<int64_t, StageSeconds>& stages, double message,
                                 bool overlaps) {
  PipelineCosts costs{.forward = 0, .input_gradients = 0, .weight_gradients = 0, .message = overlaps ? message : 0};
  const auto count = static_cast<double>(stages.size());
  for (const auto& [stage, seconds] : stages) {
    costs.forward += (seconds.forward + (overlaps ? 0 : message)) / count;
    costs.input_gradients += (seconds.input_gradients + (overlaps ? 0 : message)) / count;
    costs.weight_gradients += seconds.weight_gradients / count;
  }
  const double mean = costs.forward + costs.input_gradients + costs.weight_gradients;
  for (const auto& [stage, seconds] : stages) {
    const double own = seconds.forward + seconds.input_gradients + seconds.weight_gradients + (overlaps ? 0 : 2 * message);
    costs.stage_factors.push_back(mean > 0 ? own / mean : 1);
  }
  return simulate_pipeline(schedule, costs);
}

} // namespace

int64_t chunks_of(const PlanSettings& settings) {
  if (settings.chunks > 0) return settings.chunks;
  const auto kind = settings.schedule;
  const bool has_one =
      kind == PipelineScheduleKind::kGPipe || kind == PipelineScheduleKind::k1F1B || kind == PipelineScheduleKind::kZeroBubbleH1;
  return has_one ? 1 : 2;
}

Prediction predict_pipeline(const PlannedModel& model, const Machine& machine, const PlanSettings& settings) {
  TORCH_CHECK_VALUE(model.pipeline_loss.sum, "plan: ", model.name, " has no loss for a pipeline, but pp is ", settings.mesh.pp);
  const auto schedule = schedule_of(settings);
  const auto steps = steps_of_ranks(model, machine, settings, schedule);
  const auto fullest = std::max_element(steps.begin(), steps.end(),
                                        [](const auto& a, const auto& b) { return a.prediction.peak() < b.prediction.peak(); });
  auto prediction = fullest->prediction;
  std::map<int64_t, StageSeconds> stages;
  double after = 0;
  for (const auto& step : steps) {
    stages.insert(step.stages.begin(), step.stages.end());
    after = std::max(after, step.after);
    prediction.gathers = std::max(prediction.gathers, step.prediction.gathers);
    prediction.compute = std::max(prediction.compute, step.prediction.compute);
    prediction.flops = std::max(prediction.flops, step.prediction.flops);
  }
  const bool overlaps = machine.device != Machine::Device::kCpu;
  prediction.seconds = simulation_of(schedule, stages, fullest->message, overlaps).makespan + after;
  prediction.exposed = std::max(0.0, prediction.seconds - prediction.compute);
  const auto module = on_meta(model.build);
  for (const auto& parameter : module->parameters()) prediction.parameters += parameter.numel();
  return prediction;
}

} // namespace tessera::internal
