#include <tessera/parallel/stages/names.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

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

/// How many characters have to be put in, taken out or replaced to make `b` of `a` (Levenshtein).
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    auto diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const auto replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
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
    if (const auto distance = edits(name, other); distance < fewest) {
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
