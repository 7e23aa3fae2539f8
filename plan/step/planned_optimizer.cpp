#include <tessera/plan/step/planned_optimizer.h>

#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>

namespace tessera::internal {

namespace {

std::vector<at::Tensor> trained_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : module.parameters()) {
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  return parameters;
}

std::unique_ptr<torch::optim::Optimizer> make_muon(const torch::nn::Module& module) {
  return std::make_unique<Muon>(muon_groups(module, MuonOptions(), MuonOptions()), MuonOptions());
}

} // namespace

std::unique_ptr<torch::optim::Optimizer> make_planned_optimizer(const std::string& name, const torch::nn::Module& module) {
  constexpr double kLr = 1e-3, kMomentum = 0.9;
  auto parameters = trained_parameters(module);
  TORCH_CHECK_VALUE(!parameters.empty(), "plan: no parameter of the model trains");
  if (name == "AdamW") return std::make_unique<FusedAdamW>(std::move(parameters), torch::optim::AdamWOptions(kLr));
  if (name == "Adam") return std::make_unique<FusedAdam>(std::move(parameters), torch::optim::AdamOptions(kLr));
  if (name == "SGD") return std::make_unique<FusedSGD>(std::move(parameters), torch::optim::SGDOptions(kLr));
  if (name == "Momentum")
    return std::make_unique<FusedSGD>(std::move(parameters), torch::optim::SGDOptions(kLr).momentum(kMomentum));
  if (name == "Lion") return std::make_unique<Lion>(std::move(parameters), LionOptions(kLr));
  if (name == "Lamb") return std::make_unique<Lamb>(std::move(parameters), LambOptions(kLr));
  if (name == "Adafactor") return std::make_unique<Adafactor>(std::move(parameters), AdafactorOptions(kLr));
  if (name == "AdamW8bit") return std::make_unique<AdamW8bit>(std::move(parameters), AdamW8bitOptions(kLr));
  if (name == "Muon") return make_muon(module);
  TORCH_CHECK_VALUE(false, "plan: unknown optimizer ", name);
}

} // namespace tessera::internal
