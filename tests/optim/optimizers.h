#pragma once

#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing {

/// An optimizer of this folder with settings that use all of its terms.
struct OptimizerCase {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> make;
  bool only_matrices = false; ///< it takes parameters of two dims and more alone
};

inline std::vector<torch::optim::OptimizerParamGroup> groups_for_muon(const std::vector<at::Tensor>& parameters,
                                                                      MuonAdjustLr adjust) {
  std::vector<at::Tensor> matrices, rest;
  for (const auto& parameter : parameters) (parameter.dim() >= 2 ? matrices : rest).push_back(parameter);
  const auto options = MuonOptions(0.02).weight_decay(0.1).adjust_lr(adjust);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  if (!rest.empty()) groups.emplace_back(rest, std::make_unique<MuonOptions>(MuonOptions(options).use_muon(false)));
  return groups;
}

template <typename Optimizer, typename Options>
OptimizerCase optimizer_case(std::string name, const Options& options) {
  return {std::move(name),
          [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<Optimizer>(parameters, options); }};
}

inline OptimizerCase muon_case(std::string name, MuonAdjustLr adjust) {
  return {std::move(name), [adjust](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
            return std::make_unique<Muon>(groups_for_muon(parameters, adjust));
          }};
}

inline std::vector<OptimizerCase> optimizer_cases() {
  namespace optim = torch::optim;
  return {optimizer_case<FusedAdam>("FusedAdam", optim::AdamOptions(0.01).weight_decay(0.1)),
          optimizer_case<FusedAdam>("FusedAdam amsgrad", optim::AdamOptions(0.01).amsgrad(true)),
          optimizer_case<FusedAdamW>("FusedAdamW", optim::AdamWOptions(0.01).weight_decay(0.1)),
          optimizer_case<FusedAdamW>("FusedAdamW amsgrad", optim::AdamWOptions(0.01).amsgrad(true)),
          optimizer_case<FusedSGD>("FusedSGD", optim::SGDOptions(0.1).weight_decay(0.1)),
          optimizer_case<FusedSGD>("FusedSGD momentum", optim::SGDOptions(0.05).momentum(0.9).dampening(0.1)),
          optimizer_case<FusedSGD>("FusedSGD nesterov", optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.1)),
          optimizer_case<FusedAdagrad>(
              "FusedAdagrad", optim::AdagradOptions(0.05).lr_decay(0.01).weight_decay(0.1).initial_accumulator_value(0.1)),
          optimizer_case<Lion>("Lion", LionOptions(0.01).weight_decay(0.1)),
          optimizer_case<Lamb>("Lamb", LambOptions(0.02).weight_decay(0.1)),
          optimizer_case<Lamb>("Lamb uncorrected", LambOptions(0.02).bias_correction(false).max_coeff(0.5)),
          optimizer_case<Adafactor>("Adafactor", AdafactorOptions(0.05).weight_decay(0.1)),
          optimizer_case<Adafactor>("Adafactor eps1", AdafactorOptions(0.05).eps1(1e-4).d(1.5)),
          optimizer_case<AdamW8bit>("AdamW8bit", AdamW8bitOptions(0.01).weight_decay(0.1).min_8bit_size(50)),
          muon_case("Muon", MuonAdjustLr::kOriginal),
          muon_case("Muon as AdamW", MuonAdjustLr::kMatchRmsAdamW)};
}

} // namespace tessera::testing
