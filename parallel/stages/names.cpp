#include <tessera/parallel/stages/names.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <tessera/base/edit_distance.h>

namespace tessera::internal::pipeline {

namespace {

std::string below(const std::string& folder, const std::string& name) { return folder.empty() ? name : folder + "." + name; }

void descend(const torch::nn::Module& module, const std::string& path, ModelNames& names) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) names.parameters[below(path, item.key())] = item.value();
  for (const auto& item : module.named_buffers(/*recurse=*/false)) names.buffers[below(path, item.key())] = item.value();
  for (const auto& child : module.named_children()) {
    const auto name = below(path, child.key());
    names.modules[name] = child.value();
    descend(*child.value(), name, names);
  }
}

} // namespace

ModelNames::ModelNames(const torch::nn::Module& model) { descend(model, "", *this); }

std::vector<std::string> ModelNames::tensors_below(const std::string& member) const {
  std::vector<std::string> found;
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      if (is_below(name, member)) found.push_back(name);
    }
  }
  return found;
}

std::string ModelNames::nearest(const std::string& name) const {
  std::string best;
  size_t fewest = std::numeric_limits<size_t>::max();
  const auto look = [&](const std::string& other) {
    if (const auto distance = edit_distance(name, other); distance < fewest) {
      fewest = distance;
      best = other;
    }
  };
  for (const auto& [other, module] : modules) look(other);
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const auto& [other, tensor] : *tensors) look(other);
  }
  return best;
}

} // namespace tessera::internal::pipeline
