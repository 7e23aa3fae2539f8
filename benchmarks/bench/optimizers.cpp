#include "optimizers.h"

#include <c10/util/Exception.h>
#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/one_bit.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>

namespace tessera::benchmarks {
namespace {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using torch::nn::Module;
using torch::optim::AdamWOptions;

constexpr double kRate = 1e-4, kDecay = 0.01;
constexpr double kOneBitEps = 1e-6; // where the second moment is tiny, a step by the mean size would be huge

template <typename Optimizer, typename Options>
OptimizerPtr make(const Module& model, Options options) {
  return std::make_unique<Optimizer>(model.parameters(), options.weight_decay(kDecay));
}

/// The steps that reduce whole gradients; DeepSpeed advises a fifth of all.
int64_t warm_up_of(int64_t steps) { return std::max<int64_t>(steps / 5, 1); }

OptimizerPtr make_muon(const Module& model, int64_t /*steps*/) {
  const auto options = MuonOptions(kRate).weight_decay(kDecay).adjust_lr(MuonAdjustLr::kMatchRmsAdamW);
  return std::make_unique<Muon>(muon_groups(model, options, MuonOptions(options).weight_decay(0)), options);
}

OptimizerPtr make_with_rounded_moments(const Module& model, int64_t /*steps*/) {
  auto optimizer = std::make_unique<FusedAdamW>(model.parameters(), AdamWOptions(kRate).weight_decay(kDecay));
  optimizer->keep_moments_in(MomentDtype::kBFloat16, 0);
  return optimizer;
}

struct Row {
  const char* name;
  int64_t tensors; ///< that it keeps of a parameter
  OptimizerPtr (*make)(const Module& model, int64_t steps);
  bool reduces = false;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> all{
      {"adamw", 2, [](const Module& model, int64_t) { return make<torch::optim::AdamW>(model, AdamWOptions(kRate)); }},
      {"fused-adamw", 2, [](const Module& model, int64_t) { return make<FusedAdamW>(model, AdamWOptions(kRate)); }},
      {"sgd", 1,
       [](const Module& model, int64_t) { return make<FusedSGD>(model, torch::optim::SGDOptions(kRate).momentum(0.9)); }},
      {"lion", 1, [](const Module& model, int64_t) { return make<Lion>(model, LionOptions(kRate)); }},
      {"lamb", 2, [](const Module& model, int64_t) { return make<Lamb>(model, LambOptions(kRate)); }},
      {"adafactor", 0, [](const Module& model, int64_t) { return make<Adafactor>(model, AdafactorOptions(kRate)); }},
      {"adamw-8bit", 0, [](const Module& model, int64_t) { return make<AdamW8bit>(model, AdamW8bitOptions(kRate)); }},
      {"muon", 1, make_muon},
      {"adamw-bf16", 1, make_with_rounded_moments},
      {"onebit-adam", 3,
       [](const Module& model, int64_t steps) {
         return make<OneBitAdam>(model, OneBitAdamOptions(kRate).eps(kOneBitEps).freeze_step(warm_up_of(steps)));
       },
       true},
      {"onebit-lamb", 4,
       [](const Module& model, int64_t steps) {
         return make<OneBitLamb>(model, OneBitLambOptions(kRate).eps(kOneBitEps).freeze_step(warm_up_of(steps)));
       },
       true},
      {"zero-one-adam", 4,
       [](const Module& model, int64_t steps) {
         const auto options = ZeroOneAdamOptions(kRate).eps(kOneBitEps).var_freeze_step(warm_up_of(steps)).local_step_clipper(1);
         return make<ZeroOneAdam>(model, options);
       },
       true}};
  return all;
}

const Row& row_of_optimizer(const std::string& name) {
  const auto found = std::find_if(rows().begin(), rows().end(), [&](const Row& row) { return row.name == name; });
  TORCH_CHECK(found != rows().end(), "optimizer is '", name, "', but must be one of: ", optimizer_names());
  return *found;
}

} // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const auto& row : rows()) names.emplace_back(row.name);
  return names;
}

OptimizerPtr make_optimizer(const std::string& name, const Module& model, int64_t steps) {
  return row_of_optimizer(name).make(model, steps);
}

int64_t optimizer_tensors(const std::string& name) { return row_of_optimizer(name).tensors; }
bool reduces_by_itself(const std::string& name) { return row_of_optimizer(name).reduces; }

} // namespace tessera::benchmarks
