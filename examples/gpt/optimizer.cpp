#include "gpt/optimizer.h"

#include <tessera/tessera.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

namespace gpt {
namespace {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// The matrices with weight decay, and the vectors without.
template <typename Settings>
Groups groups_of(const torch::nn::Module& model, const Settings& settings, double weight_decay) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model.parameters()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  Groups groups;
  groups.emplace_back(std::move(matrices), std::make_unique<Settings>(Settings(settings).weight_decay(weight_decay)));
  groups.emplace_back(std::move(vectors), std::make_unique<Settings>(Settings(settings).weight_decay(0)));
  return groups;
}

template <typename Optimizer, typename Settings>
OptimizerPtr make(const torch::nn::Module& model, const Options& options, const Settings& settings) {
  return std::make_unique<Optimizer>(groups_of(model, settings, options.weight_decay), settings);
}

/// Muon for the matrices of the blocks. Its learning rates are AdamW's, which steps embeddings, norms and biases.
OptimizerPtr make_muon(const torch::nn::Module& model, const Options& options) {
  const auto settings = tessera::MuonOptions(options.learning_rate)
                            .weight_decay(options.weight_decay)
                            .adjust_lr(tessera::MuonAdjustLr::kMatchRmsAdamW);
  return std::make_unique<tessera::Muon>(tessera::muon_groups(model, settings, tessera::MuonOptions(settings).weight_decay(0)),
                                         settings);
}

constexpr std::pair kBetas{0.9, 0.95};

OptimizerPtr make_with_rounded_moments(const torch::nn::Module& model, const Options& options) {
  const auto settings = torch::optim::AdamWOptions(options.learning_rate).betas(kBetas);
  auto optimizer = std::make_unique<tessera::FusedAdamW>(groups_of(model, settings, options.weight_decay), settings);
  optimizer->keep_moments_in(tessera::MomentDtype::kBFloat16, options.seed);
  return optimizer;
}

/// The steps that reduce whole gradients; DeepSpeed advises a fifth of all.
int64_t warm_up_of(const Options& options) { return std::max<int64_t>(options.steps / 5, 1); }

constexpr double kOneBitEps = 1e-6; ///< where the second moment is tiny, a step by the mean size would be huge

OptimizerPtr make_one_bit_adam(const torch::nn::Module& model, const Options& options) {
  auto settings = tessera::OneBitAdamOptions(options.learning_rate).betas(kBetas).eps(kOneBitEps);
  return make<tessera::OneBitAdam>(model, options, settings.freeze_step(warm_up_of(options)));
}

OptimizerPtr make_one_bit_lamb(const torch::nn::Module& model, const Options& options) {
  auto settings = tessera::OneBitLambOptions(options.learning_rate).eps(kOneBitEps);
  return make<tessera::OneBitLamb>(model, options, settings.freeze_step(warm_up_of(options)));
}

OptimizerPtr make_zero_one_adam(const torch::nn::Module& model, const Options& options) {
  auto settings = tessera::ZeroOneAdamOptions(options.learning_rate).betas(kBetas).eps(kOneBitEps);
  return make<tessera::ZeroOneAdam>(model, options, settings.var_freeze_step(warm_up_of(options)).local_step_clipper(1));
}

using Maker = std::function<OptimizerPtr(const torch::nn::Module&, const Options&)>;

const std::vector<std::pair<std::string, Maker>>& makers() {
  namespace optim = torch::optim;
  static const std::vector<std::pair<std::string, Maker>> all{
      {"adamw",
       [](const auto& model, const auto& options) {
         return make<optim::AdamW>(model, options, optim::AdamWOptions(options.learning_rate).betas(kBetas));
       }},
      {"fused-adamw",
       [](const auto& model, const auto& options) {
         return make<tessera::FusedAdamW>(model, options, optim::AdamWOptions(options.learning_rate).betas(kBetas));
       }},
      {"sgd",
       [](const auto& model, const auto& options) {
         return make<tessera::FusedSGD>(model, options, optim::SGDOptions(options.learning_rate).momentum(0.9));
       }},
      {"lion",
       [](const auto& model, const auto& options) {
         return make<tessera::Lion>(model, options, tessera::LionOptions(options.learning_rate));
       }},
      {"lamb",
       [](const auto& model, const auto& options) {
         return make<tessera::Lamb>(model, options, tessera::LambOptions(options.learning_rate));
       }},
      {"adafactor",
       [](const auto& model, const auto& options) {
         return make<tessera::Adafactor>(model, options, tessera::AdafactorOptions(options.learning_rate));
       }},
      {"adamw-8bit",
       [](const auto& model, const auto& options) {
         return make<tessera::AdamW8bit>(model, options, tessera::AdamW8bitOptions(options.learning_rate).betas(kBetas));
       }},
      {"muon", make_muon},
      {"adamw-bf16", make_with_rounded_moments},
      {"onebit-adam", make_one_bit_adam},
      {"onebit-lamb", make_one_bit_lamb},
      {"zero-one-adam", make_zero_one_adam}};
  return all;
}

} // namespace

OptimizerPtr make_optimizer(const torch::nn::Module& model, const Options& options) {
  for (const auto& [name, maker] : makers()) {
    if (name == options.optimizer) return maker(model, options);
  }
  TORCH_CHECK(false, "--optimizer is '", options.optimizer, "', but must be one of ", optimizer_names());
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const auto& [name, maker] : makers()) names.push_back(name);
  return names;
}

double learning_rate(const Options& options, int64_t step) {
  if (step < options.warmup) return options.learning_rate * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
  const auto decay_steps = std::max<int64_t>(options.steps - options.warmup, 1);
  const auto progress = std::min(1.0, static_cast<double>(step - options.warmup + 1) / static_cast<double>(decay_steps));
  return options.learning_rate * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * progress)));
}

} // namespace gpt
