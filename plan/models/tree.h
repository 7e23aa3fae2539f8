#pragma once

// Internal: puts modules and parameters at paths, with plain modules between.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <utility>

namespace tessera::internal::models {

/// The module at `path` below `root`, which it makes where it is not there; "" is the root.
torch::nn::Module& module_at(torch::nn::Module& root, const std::string& path);

/// "a.b.c" as "a.b" and "c".
std::pair<std::string, std::string> parent_and_name(const std::string& path);

template <typename Holder>
Holder put(torch::nn::Module& root, const std::string& path, Holder module) {
  const auto [parent, name] = parent_and_name(path);
  return module_at(root, parent).register_module(name, std::move(module));
}

inline at::Tensor put_parameter(torch::nn::Module& root, const std::string& path, at::Tensor value) {
  const auto [parent, name] = parent_and_name(path);
  return module_at(root, parent).register_parameter(name, std::move(value));
}

inline torch::nn::Linear linear(int64_t from, int64_t to, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(bias));
}

} // namespace tessera::internal::models
