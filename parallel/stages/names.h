#pragma once

// Internal: where names of a model lead.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal::pipeline {

/// Everything below a model by its full name; a tensor or module that is registered twice under each of its names.
struct ModelNames {
  explicit ModelNames(const torch::nn::Module& model);

  /// All names below `member`, a module, a parameter or a buffer; those of tensors alone. Empty for a name that leads nowhere.
  std::vector<std::string> tensors_below(const std::string& member) const;
  /// The name that is written most like `name`.
  std::string nearest(const std::string& name) const;

  std::map<std::string, std::shared_ptr<torch::nn::Module>> modules;
  std::map<std::string, at::Tensor> parameters, buffers;
};

/// The part before the last dot, and the part behind it.
inline std::string_view folder_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}
inline std::string_view last_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }
/// Whether `name` is `folder` or below it.
inline bool is_below(std::string_view name, std::string_view folder) {
  return name.starts_with(folder) && (name.size() == folder.size() || name[folder.size()] == '.');
}

} // namespace tessera::internal::pipeline
