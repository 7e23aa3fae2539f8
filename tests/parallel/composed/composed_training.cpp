#include "composed_training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/parallel/composed/training_parts.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::composed {

namespace {

const StateDictOptions kFlat{.flatten_optimizer_state_dict = true};

std::vector<PipelineValue> values_of(const std::vector<Batch>& batches) { return {batches.begin(), batches.end()}; }

PipelineLoss loss_of_batches() {
  return {.sum = [](const PipelineValue& logits,
                    const PipelineValue& batch) { return summed_loss(logits.toTensor(), batch.to<Batch>()); },
          .count = [](const PipelineValue& batch) { return counted(batch.to<Batch>()); }};
}

} // namespace

std::string Shape::text() const {
  return c10::str("pp ", pipeline, ", replicate ", replicas, ", shard ", shards, ", cp ", parts, ", tp ", tensor, ", ep ",
                  experts);
}

std::string Manner::text() const {
  return c10::str(shape.text(), ", schedule ", static_cast<int>(kind), recomputes ? ", recomputed" : "",
                  residency == Residency::kStage ? "" : ", gathered for each micro-batch", ", resident ", resident_stages, ", ",
                  to_string(scheme), in_half ? ", in half" : "", gathers_codes ? ", gathered as codes" : "");
}

int64_t chunks_of(PipelineScheduleKind kind) {
  using enum PipelineScheduleKind;
  return kind == kGPipe || kind == k1F1B || kind == kZeroBubbleH1 ? 1 : 2;
}

bool takes(PipelineScheduleKind kind, int64_t ranks, int64_t micro_batches) {
  try {
    pipeline_schedule(kind, {.ranks = ranks, .micro_batches = micro_batches, .chunks = chunks_of(kind)});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

SplitTraining::SplitTraining(const Task& task, const Manner& manner) : Training(task) {
  make(manner);
  if (task.scales) scaler_.emplace(GradScalerOptions{.init_scale = 1024, .mesh = mesh_});
}

void SplitTraining::make(const Manner& manner) {
  manner_ = manner;
  const auto& shape = manner.shape;
  pipeline_.reset();
  stages_.reset();
  average_.reset();
  mesh_ = init_device_mesh(torch::kCPU,
                           {std::max<int64_t>(1, shape.pipeline), shape.replicas, shape.shards, shape.parts, shape.tensor},
                           {"pp", "replicate", "shard", "cp", "tp"});
  data_ = mesh_[{"replicate", "shard", "cp"}];
  net_ = make_net(task_.net, task_.seed);
  net_->recomputes = manner.recomputes;
  net_->scheme = manner.scheme;
  if (shape.pipeline > 0) {
    const auto schedule = pipeline_schedule(
        manner.kind, {.ranks = shape.pipeline, .micro_batches = 2 * shape.pipeline, .chunks = chunks_of(manner.kind)});
    stages_ = split(layers_of(*net_), mesh_["pp"], {.rank_of_stage = schedule.rank_of_stage});
  }
  split_net();
  shard_net();
  make_pipeline();
  optimizer_ = make_optimizer(module().parameters(), task_.adamw());
  if (task_.averages) average_.emplace(module(), ema(0.7));
}

void SplitTraining::make_pipeline() {
  if (stages_)
    pipeline_.emplace(
        *stages_, manner_.kind, loss_of_batches(),
        PipelineOptions{.data_mesh = data_, .residency = manner_.residency, .resident_stages = manner_.resident_stages});
}

void SplitTraining::split_net() {
  const auto& shape = manner_.shape;
  if (task_.net.experts > 0) {
    const auto experts = expert_mesh(mesh_[{"shard", "cp", "tp"}], shape.experts);
    const ExpertParallelOptions options{.tokens = mesh_[{"replicate", "shard", "cp", "tp"}],
                                        .tensor_parallel = shape.tensor > 1 ? mesh_["tp"] : DeviceMesh()};
    stages_ ? expert_parallel(*stages_, experts["ep"], options) : expert_parallel(*net_, experts["ep"], options);
  }
  if (shape.tensor == 1) return;
  ParallelPlan plan{{"blocks.*.dense.up", Colwise{}}, {"blocks.*.dense.down", Rowwise{}}};
  if (task_.net.attending > 0) {
    plan.push_back({"blocks.*.dense.query", Colwise{}});
    plan.push_back({"blocks.*.dense.projection", Rowwise{}});
  }
  stages_ ? parallelize(*stages_, mesh_["tp"], plan) : parallelize(*net_, mesh_["tp"], plan);
}

void SplitTraining::shard_experts(const FullyShardOptions& options) {
  const auto& shape = manner_.shape;
  const auto efsdp = expert_mesh(mesh_[{"shard", "cp", "tp"}], shape.experts)["efsdp"];
  const auto same = shape.replicas == 1 ? efsdp : DeviceMesh::concatenate({mesh_["replicate"], efsdp});
  for (auto* layer : moe_layers(module())) fully_shard(*layer->experts(), same, options);
}

void SplitTraining::shard_net() {
  const auto& shape = manner_.shape;
  FullyShardOptions options;
  if (manner_.in_half) options.mixed_precision = {.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat};
  if (task_.net.experts > 0) shard_experts(options);
  if (data_.size() == 1 && task_.net.experts == 0 && !manner_.in_half) return;
  const auto flat = mesh_[{"shard", "cp"}].flatten("shard_cp");
  options.strategy = manner_.strategy;
  if (manner_.gathers_codes) options.gather_extension_fn = float8_gather(*net_); // a stage may have none
  const bool is_replicated = shape.shards * shape.parts == 1 && shape.replicas > 1;
  if (is_replicated) options.strategy = Strategy::kNoShard;
  const auto mesh = is_replicated        ? mesh_["replicate"]
                    : shape.replicas > 1 ? DeviceMesh::concatenate({mesh_["replicate"], flat})
                                         : flat;
  if (stages_) return fully_shard(*stages_, mesh, options);
  for (auto& block : *net_->blocks) fully_shard(*block, mesh, options);
  fully_shard(*net_, mesh, options);
}

std::vector<Batch> SplitTraining::batches(uint64_t seed, int64_t micro_batches) {
  std::vector<Batch> all;
  const auto rank = mesh_.local_rank("replicate") * manner_.shape.shards + mesh_.local_rank("shard");
  for (int64_t i = 0; i < micro_batches; ++i) {
    auto batch = draw_batch(task_.net, seed, rank, i);
    all.push_back(manner_.shape.parts > 1 ? split_batch(*net_, batch, mesh_["cp"], manner_.order) : std::move(batch));
  }
  return all;
}

double SplitTraining::sum_over_data(double number) const {
  const auto sum = torch::full({1}, number, torch::kDouble);
  process_context().communicator(data_.rank_list(), torch::kCPU)->all_reduce(sum, ReduceOp::kSum, "losses").wait();
  return sum.item<double>();
}

double SplitTraining::count_of(const std::vector<Batch>& batches) const {
  double count = 0;
  for (const auto& batch : batches) count += counted(batch);
  return sum_over_data(count);
}

/// Without a pipeline. Returns the loss over all ranks.
double SplitTraining::run_loop(const std::vector<Batch>& batches, double count, bool is_last) {
  double sum = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    std::optional<NoSync> waits;
    if ((!is_last || i + 1 < batches.size()) && is_sharded(*net_)) waits.emplace(*net_);
    const auto loss = summed_loss(net_->forward(batches[i]), batches[i]);
    sum += (is_dtensor(loss) ? DTensor(loss).full_tensor() : loss).item<double>();
    if (!torch::GradMode::is_enabled()) continue;
    const auto own = loss * (static_cast<double>(data_.size()) / count);
    (scaler_ ? scaler_->scale(own) : own).backward();
  }
  return sum_over_data(sum) / count;
}

void SplitTraining::backward_all(const StepPlan& plan) {
  std::vector<std::vector<Batch>> calls;
  double count = 0, loss = 0;
  for (int64_t call = 0; call < plan.calls; ++call) {
    calls.push_back(batches(plan.seed + static_cast<uint64_t>(call), plan.micro_batches));
    count += count_of(calls.back());
  }
  for (int64_t call = 0; call < plan.calls; ++call) {
    const bool is_last = call + 1 == plan.calls;
    if (plan.evaluates && call > 0) evaluate(plan.seed + 5000, plan.micro_batches);
    const auto& own = calls[static_cast<size_t>(call)];
    if (!pipeline_) {
      loss += run_loop(own, count, is_last);
      continue;
    }
    PipelineStepOptions options{.is_last = is_last};
    if (plan.calls > 1) options.count = count;
    if (scaler_) options.scale = [&](const torch::Tensor& each) { return scaler_->scale(each); };
    loss += pipeline_->step(values_of(own), options).item<double>();
  }
  if (plan.nan_block < 0) return numbers.push_back(loss);
  EXPECT_TRUE(std::isnan(loss)) << "rank " << process_context().rank() << ": " << loss;
}

/// The same, with the NaN that `plan` asks for.
void SplitTraining::backward_of(const StepPlan& plan) {
  if (plan.nan_block < 0) return backward_all(plan);
  const auto* const chosen = net_->blocks[static_cast<size_t>(plan.nan_block)]->as<Block>();
  const bool is_first = mesh_.local_rank("replicate") == 0 && mesh_.local_rank("shard") == 0;
  bool is_done = !is_first;
  net_->before_block = [&](const BlockImpl& each, const torch::Tensor& x) {
    if (&each != chosen || std::exchange(is_done, true)) return;
    const torch::NoGradGuard no_grad;
    x.fill_(NAN);
  };
  backward_all(plan);
  net_->before_block = nullptr;
}

void SplitTraining::step(const StepPlan& plan) {
  optimizer_->zero_grad();
  backward_of(plan);
  if (plan.overflows && process_context().rank() == 0) {
    const torch::NoGradGuard no_grad;
    for (auto& each : module().parameters()) {
      if (each.grad().defined()) each.mutable_grad().fill_(INFINITY);
    }
  }
  if (scaler_) scaler_->unscale_(*optimizer_);
  if (task_.max_norm > 0) {
    const auto norm = stages_ ? clip_grad_norm_(*stages_, task_.max_norm) : clip_grad_norm_(*net_, task_.max_norm);
    if (!plan.is_skipped()) numbers.push_back(norm.item<double>());
  }
  if (task_.net.experts > 0) update_expert_bias(module());
  if (scaler_) {
    EXPECT_EQ(scaler_->step(*optimizer_), !plan.is_skipped());
    scaler_->update();
  } else {
    optimizer_->step();
  }
  if (average_) average_->update_parameters(module());
}

void SplitTraining::evaluate(uint64_t seed, int64_t micro_batches) {
  const torch::NoGradGuard no_grad;
  std::optional<AveragedWeights> averages;
  if (average_ && average_->n_averaged() > 0) averages.emplace(*average_, module());
  const auto own = batches(seed, micro_batches);
  module().eval();
  numbers.push_back(pipeline_ ? pipeline_->evaluate(values_of(own)).item<double>() : run_loop(own, count_of(own), true));
  module().train();
}

StateDict SplitTraining::state(bool saves) {
  auto state = state_dict(module(), *optimizer_, kFlat);
  if (average_) state.merge(state_dict(*average_));
  if (saves && stages_) state.erase_if([&](const StateDict::Entry& entry) { return stages_->is_copy(entry.name); });
  return state;
}

void SplitTraining::resume(const Manner& manner, const std::filesystem::path& folder) {
  checkpoint::save(state(/*saves=*/true), folder, {.update_latest = false});
  make(manner);
  for (const auto& [part, trains] : frozen_) freeze_in(module(), part, trains);
  checkpoint::load(state(/*saves=*/false), folder);
}

void SplitTraining::freeze(const std::string& part, bool trains) {
  frozen_.emplace_back(part, trains);
  freeze_in(module(), part, trains);
}

std::map<std::string, torch::Tensor> SplitTraining::weights() {
  std::map<std::string, torch::Tensor> all;
  add_weights(module(), "", all);
  if (!average_) return all;
  const AveragedWeights averages(*average_, module());
  add_weights(module(), "average.", all);
  return all;
}

/// Gradients are dropped.
std::string SplitTraining::error_of(const std::function<void()>& step) {
  optimizer_->zero_grad();
  std::string error;
  try {
    step();
  } catch (const c10::Error& thrown) {
    error = thrown.what_without_backtrace();
  }
  optimizer_->zero_grad();
  return error;
}

/// Calls `throws` of the block's input in each forward.
std::string SplitTraining::error_at(int64_t block, const std::function<void(const torch::Tensor& x)>& throws,
                                    const std::function<void()>& step) {
  const auto* const chosen = net_->blocks[static_cast<size_t>(block)]->as<Block>();
  net_->before_block = [&](const BlockImpl& each, const torch::Tensor& x) {
    if (&each == chosen) throws(x);
  };
  auto error = error_of(step);
  net_->before_block = nullptr;
  return error;
}

std::string SplitTraining::fail(const StepPlan& plan, int64_t block, int64_t micro_batch) {
  int64_t calls = 0;
  const auto throws = [&](const torch::Tensor&) { TORCH_CHECK(calls++ < micro_batch, "out of luck"); };
  return error_at(block, throws, [&] { backward_all(plan); });
}

std::string SplitTraining::fail_in_backward(const StepPlan& plan, int64_t block, int64_t micro_batch) {
  int64_t calls = 0;
  const auto hooks = [&](const torch::Tensor& x) {
    if (x.requires_grad()) x.register_hook([&](const torch::Tensor&) { TORCH_CHECK(calls++ < micro_batch, "out of luck"); });
  };
  return error_at(block, hooks, [&] { backward_all(plan); });
}

std::string SplitTraining::fail_in_gradient(const StepPlan& plan, const std::string& name) {
  auto calls = plan.micro_batches;
  const auto parameters = module().named_parameters();
  const auto* const parameter = parameters.find(name);
  if (!parameter) return error_of([&] { backward_all(plan); });
  const auto hook = parameter->register_hook([&](const torch::Tensor&) { TORCH_CHECK(--calls > 0, "out of luck"); });
  auto error = error_of([&] { backward_all(plan); });
  parameter->remove_hook(hook);
  return error;
}

std::string SplitTraining::fail_in_evaluation(const StepPlan& plan, int64_t block) {
  const auto throws = [](const torch::Tensor&) { TORCH_CHECK(false, "out of luck"); };
  return error_at(block, throws, [&] { evaluate(plan.seed, plan.micro_batches); });
}

void SplitTraining::change_schedule(PipelineScheduleKind kind) {
  manner_.kind = kind;
  pipeline_.reset();
  make_pipeline();
}

std::vector<Shape> shapes_of(int64_t ranks, int64_t experts) {
  std::vector<Shape> all;
  const auto divides = [&](int64_t part) { return ranks % part == 0; };
  for (int64_t pp = 0; pp <= ranks; ++pp) {
    for (int64_t replicas = 1; replicas <= ranks; ++replicas) {
      for (int64_t shards = 1; shards <= ranks; ++shards) {
        for (int64_t parts = 1; parts <= ranks; ++parts) {
          const auto others = std::max<int64_t>(1, pp) * replicas * shards * parts;
          if (!divides(others)) continue;
          const auto tensor = ranks / others;
          if (tensor == 3 || tensor > 4) continue; // which do not divide the heads
          if (experts > 0 && parts == 3) continue; // nor the sequences
          for (int64_t of_experts = 1; of_experts <= (experts > 0 ? shards * parts * tensor : 1); ++of_experts) {
            if ((shards * parts * tensor) % of_experts == 0 && (experts == 0 || experts % of_experts == 0))
              all.push_back({pp, replicas, shards, parts, tensor, of_experts});
          }
        }
      }
    }
  }
  return all;
}

bool run_as(int64_t ranks, const std::function<void()>& program) {
  if (world_size() == ranks) {
    program();
  } else if (world_size() == 1) {
    run_ranks_as_threads(static_cast<int>(ranks), program);
  } else {
    return false;
  }
  return true;
}

void expect_same(Training& actual, const std::vector<double>& numbers, const std::map<std::string, torch::Tensor>& weights,
                 double bound) {
  EXPECT_EQ(actual.numbers.size(), numbers.size());
  for (size_t i = 0; i < std::min(numbers.size(), actual.numbers.size()); ++i) {
    if (std::abs(actual.numbers[i] - numbers[i]) <= bound) continue;
    ADD_FAILURE() << "rank " << process_context().rank() << ": number " << i << " is " << actual.numbers[i] << ", not "
                  << numbers[i];
    break;
  }
  for (const auto& [name, weight] : actual.weights()) {
    const auto error = (weight.to(torch::kDouble) - weights.at(name).to(torch::kDouble)).abs().max().item<double>();
    if (!(error <= bound)) ADD_FAILURE() << "rank " << process_context().rank() << ": " << name << " differs by " << error;
  }
}

} // namespace tessera::testing::composed
