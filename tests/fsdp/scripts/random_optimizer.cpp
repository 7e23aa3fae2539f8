#include "random_optimizer.h"

#include <algorithm>
#include <functional>
#include <vector>

#include <tessera/optim/adafactor.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/lamb.h>

#include <tessera/tests/support/lion.h>

namespace tessera::testing::scripts {
namespace {

using torch::Tensor;
using Parameters = std::vector<Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

constexpr double kLearningRate = 0.02;
constexpr double kEpsilon = 1e-2; ///< large: small gradients must not become steps of full size, which would amplify rounding

template <typename Optimizer, typename Options>
std::function<OptimizerPtr(const Parameters&)> maker(Options options) {
  return [options](const Parameters& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

struct OptimizerKind {
  std::string name;
  bool takes_complex; ///< in LibTorch
  std::function<OptimizerPtr(const Parameters&)> make;
};

/// A class of the program's own.
LionOptions smooth_lion() {
  register_lion();
  LionOptions options(kLearningRate);
  options.softness = kEpsilon;
  return options;
}

// Those that round states or directions are left out: what rounding makes of sums in another order grows by them.
const std::vector<OptimizerKind>& kinds() {
  using namespace torch::optim; // NOLINT(google-build-using-namespace)
  static const std::vector<OptimizerKind> all{
      {"SGD", true, maker<SGD>(SGDOptions(kLearningRate))},
      {"SGD with momentum", true, maker<SGD>(SGDOptions(kLearningRate).momentum(0.9))},
      {"SGD with Nesterov", true, maker<SGD>(SGDOptions(kLearningRate).momentum(0.9).nesterov(true).weight_decay(0.05))},
      {"Adam", true, maker<Adam>(AdamOptions(kLearningRate).eps(kEpsilon).weight_decay(0.01))},
      {"AMSGrad", false, maker<Adam>(AdamOptions(kLearningRate).eps(kEpsilon).amsgrad(true))},
      {"AdamW", false, maker<AdamW>(AdamWOptions(kLearningRate).eps(kEpsilon))},
      {"RMSprop", false, maker<RMSprop>(RMSpropOptions(0.1 * kLearningRate).eps(kEpsilon).momentum(0.5).centered(true))},
      {"Adagrad", false, maker<Adagrad>(AdagradOptions(kLearningRate).eps(kEpsilon))},
      {"Lion", false, maker<Lion>(smooth_lion())},
      {"FusedAdamW", false, maker<FusedAdamW>(AdamWOptions(kLearningRate).eps(kEpsilon).amsgrad(true))},
      {"FusedAdam", false, maker<FusedAdam>(AdamOptions(kLearningRate).eps(kEpsilon).weight_decay(0.01))},
      {"FusedSGD", false, maker<FusedSGD>(SGDOptions(kLearningRate).momentum(0.9).nesterov(true).weight_decay(0.05))},
      {"FusedAdagrad", false, maker<FusedAdagrad>(AdagradOptions(kLearningRate).eps(kEpsilon))},
      {"Lamb", false, maker<Lamb>(LambOptions(kLearningRate).eps(kEpsilon).weight_decay(0.05))},
      {"Adafactor", false, maker<Adafactor>(AdafactorOptions(kLearningRate).eps1(kEpsilon))},
  };
  return all;
}

/// The last `held_back` as a group of their own; at least one stays in the first.
std::pair<Parameters, Parameters> groups(const Parameters& all, size_t held_back) {
  const auto cut = all.end() - static_cast<std::ptrdiff_t>(std::min(held_back, all.size() - 1));
  return {{all.begin(), cut}, {cut, all.end()}};
}

} // namespace

std::vector<Tensor> distinct(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> found;
  for (const auto& parameter : parameters) {
    const auto same = [&](const Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(found.begin(), found.end(), same)) found.push_back(parameter);
  }
  return found;
}

OptimizerPlan::OptimizerPlan(Draw& draw) : kind(static_cast<size_t>(draw.below(static_cast<int64_t>(kinds().size())))) {
  if (draw.chance(20)) held_back = static_cast<size_t>(1 + draw.below(2));
  lists_twice = held_back == 0 && draw.chance(20);
}

std::string OptimizerPlan::name() const { return kinds()[kind].name; }

OptimizerPtr OptimizerPlan::make(const torch::nn::Module& module) const {
  auto [first, second] = groups(lists_twice ? module.parameters() : distinct(module.parameters()), held_back);
  auto optimizer = over(first);
  if (has_second_group) optimizer->add_param_group(torch::optim::OptimizerParamGroup(second));
  return optimizer;
}

OptimizerPtr OptimizerPlan::over(const Parameters& parameters) const {
  const bool complex = std::any_of(parameters.begin(), parameters.end(), [](const Tensor& each) { return each.is_complex(); });
  return kinds()[complex && !kinds()[kind].takes_complex ? 0 : kind].make(parameters);
}

bool OptimizerPlan::add_group(torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  const auto second = groups(distinct(module.parameters()), held_back).second;
  // LibTorch's Adagrad makes its state in its constructor, and a step that comes to a parameter without ends half-way.
  if (second.empty() || has_second_group || name() == "Adagrad") return false;
  has_second_group = true;
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(second));
  return true;
}

} // namespace tessera::testing::scripts
