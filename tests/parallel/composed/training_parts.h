#pragma once

// What a training of one process and one of many ranks have alike.

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/api.h>

namespace tessera::testing::composed {

/// AdamW with this eps; SGD without one.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<torch::Tensor>& parameters,
                                                               std::optional<double> eps) {
  if (eps) return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3).eps(*eps));
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

inline void freeze_in(torch::nn::Module& module, const std::string& part, bool trains) {
  for (auto& item : module.named_parameters()) {
    if (item.key().find(part) == std::string::npos) continue;
    item.value().mutable_grad().reset();
    item.value().requires_grad_(trains);
  }
}

inline torch::Tensor whole_of(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor().clone() : tensor.detach().clone();
}

inline void add_weights(const torch::nn::Module& module, const std::string& prefix,
                        std::map<std::string, torch::Tensor>& weights) {
  const torch::NoGradGuard no_grad;
  for (const auto& items : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : items) weights[prefix + item.key()] = whole_of(item.value());
  }
}

} // namespace tessera::testing::composed
