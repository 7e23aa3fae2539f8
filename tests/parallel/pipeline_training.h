#pragma once

// Training of the small GPT in a pipeline, beside one process.

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/dtensor/api.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/parallel/pipeline_gpt.h>

namespace tessera::testing {

/// Micro-batch `index` of a step of data rank `rank`. With `uneven` rows and time differ, and so do the targets that count.
inline TextBatch draw_text(int64_t step, int64_t rank, int64_t index, bool uneven = true) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10000 * step + 100 * rank + index));
  const auto rows = uneven ? 1 + (index + rank) % 3 : 2, time = uneven ? 4 + index % 4 : 8;
  const auto text = torch::randint(PipelineGptImpl::kVocabulary, {rows, time + 1}, generator, torch::kLong);
  auto targets = text.slice(1, 1).clone();
  if (uneven) targets.select(1, 0).fill_(-100); // which does not count
  return {text.slice(1, 0, time).contiguous(), targets};
}

inline torch::Tensor summed_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum);
}

inline double counted(const torch::Tensor& targets) { return static_cast<double>(targets.ge(0).sum().item<int64_t>()); }

inline PipelineLoss text_loss() {
  return {.sum = [](const PipelineValue& logits,
                    const PipelineValue& batch) { return summed_loss(logits.toTensor(), std::get<1>(batch.to<TextBatch>())); },
          .count = [](const PipelineValue& batch) { return counted(std::get<1>(batch.to<TextBatch>())); }};
}

using OptimizerMaker = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

inline std::unique_ptr<torch::optim::Optimizer> pipeline_sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}
inline std::unique_ptr<torch::optim::Optimizer> pipeline_adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}

struct TrainingPlan {
  int64_t steps = 20, micro_batches = 4, data_ranks = 1;
  double max_norm = 0.5; ///< 0: no clipping
  bool uneven = true;
  OptimizerMaker optimizer = pipeline_sgd;
};

struct TrainingResult {
  std::vector<double> losses, norms;
  std::map<std::string, torch::Tensor> weights;
};

/// One process, with the micro-batches of all data ranks.
inline TrainingResult train_alone(PipelineGpt model, const TrainingPlan& plan) {
  std::vector<torch::Tensor> parameters = model->parameters();
  const auto optimizer = plan.optimizer(parameters);
  TrainingResult result;
  for (int64_t step = 0; step < plan.steps; ++step) {
    optimizer->zero_grad();
    std::vector<TextBatch> batches;
    for (int64_t rank = 0; rank < plan.data_ranks; ++rank) {
      for (int64_t i = 0; i < plan.micro_batches; ++i) batches.push_back(draw_text(step, rank, i, plan.uneven));
    }
    double count = 0, sum = 0;
    for (const auto& [text, targets] : batches) count += counted(targets);
    for (const auto& [text, targets] : batches) {
      const auto loss = summed_loss(model->forward(text), targets);
      (loss / count).backward();
      sum += loss.item<double>();
    }
    result.losses.push_back(sum / count);
    if (plan.max_norm > 0) result.norms.push_back(clip_grad_norm_(parameters, plan.max_norm).item<double>());
    optimizer->step();
  }
  for (const auto& item : model->named_parameters()) result.weights[item.key()] = item.value().detach().clone();
  return result;
}

/// The micro-batches of a step of a data rank.
inline std::vector<PipelineValue> text_batches(const TrainingPlan& plan, int64_t step, int64_t data_rank) {
  std::vector<PipelineValue> batches;
  for (int64_t i = 0; i < plan.micro_batches; ++i) batches.emplace_back(draw_text(step, data_rank, i, plan.uneven));
  return batches;
}

/// This rank's part of a pipeline; the weights are whole ones, of its stages.
inline TrainingResult train_in_pipeline(Pipeline& pipeline, const TrainingPlan& plan, int64_t data_rank = 0) {
  const auto& stages = pipeline.stages();
  const auto optimizer = plan.optimizer(stages.parameters());
  TrainingResult result;
  for (int64_t step = 0; step < plan.steps; ++step) {
    optimizer->zero_grad();
    result.losses.push_back(pipeline.step(text_batches(plan, step, data_rank)).item<double>());
    if (plan.max_norm > 0) result.norms.push_back(clip_grad_norm_(stages, plan.max_norm).item<double>());
    optimizer->step();
  }
  const torch::NoGradGuard no_grad;
  for (const auto& item : stages.module->named_parameters()) {
    const auto value = item.value().detach();
    result.weights[item.key()] = is_dtensor(value) ? DTensor(value).full_tensor().clone() : value.clone();
  }
  return result;
}

inline const StateDictOptions kFlatOptimizer{.flatten_optimizer_state_dict = true};

/// What a pipeline trains, each copy of a tied weight once.
inline void save_stages(const PipelineStages& stages, torch::optim::Optimizer& optimizer, const std::filesystem::path& folder) {
  auto state = state_dict(*stages.module, optimizer, kFlatOptimizer);
  state.erase_if([&](const StateDict::Entry& entry) { return stages.is_copy(entry.name); });
  checkpoint::save(state, folder);
}

inline void load_stages(const PipelineStages& stages, torch::optim::Optimizer& optimizer, const std::filesystem::path& folder) {
  checkpoint::load(state_dict(*stages.module, optimizer, kFlatOptimizer), folder);
}

/// Fails where losses, norms or weights differ by more than `bound`.
void expect_same_training(const TrainingResult& actual, const TrainingResult& expected, double bound);

inline void expect_same_training(const TrainingResult& actual, const TrainingResult& expected, double bound) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) ASSERT_NEAR(actual.losses[i], expected.losses[i], bound) << "loss " << i;
  for (size_t i = 0; i < expected.norms.size(); ++i) ASSERT_NEAR(actual.norms[i], expected.norms[i], bound) << "norm " << i;
  for (const auto& [name, weight] : actual.weights) {
    const auto error = (weight - expected.weights.at(name)).abs().max().item<double>();
    ASSERT_LE(error, bound) << name;
  }
}

} // namespace tessera::testing
