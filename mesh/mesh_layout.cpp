#include <tessera/mesh/mesh_layout.h>

#include <algorithm>

namespace tessera::internal {

DimLayout join(const std::vector<DimLayout>& dims) {
  DimLayout joined;
  for (const auto& dim : dims) {
    for (const auto& step : dim) {
      if (step.size == 1) continue;
      if (!joined.empty() && joined.back().stride == step.size * step.stride) {
        joined.back() = {joined.back().size * step.size, step.stride};
      } else {
        joined.push_back(step);
      }
    }
  }
  return joined;
}

std::optional<std::vector<DimLayout>> split(const DimLayout& dim, const std::vector<int64_t>& sizes) {
  auto rest = dim;
  std::vector<DimLayout> parts(sizes.size());
  for (size_t part = sizes.size(); part-- > 0;) {
    for (int64_t needed = sizes[part]; needed > 1;) {
      auto& inner = rest.back();
      const int64_t taken = std::min(inner.size, needed);
      if (inner.size % taken != 0 || needed % taken != 0) return std::nullopt;
      parts[part].insert(parts[part].begin(), {taken, inner.stride});
      needed /= taken;
      inner = {inner.size / taken, inner.stride * taken};
      if (inner.size == 1) rest.pop_back();
    }
    parts[part] = join({parts[part]});
  }
  return parts;
}

int64_t distance(const DimLayout& dim, int64_t index) {
  int64_t result = 0;
  for (size_t step = dim.size(); step-- > 0; index /= dim[step].size) result += index % dim[step].size * dim[step].stride;
  return result;
}

bool overlap(const std::vector<DimLayout>& dims) {
  DimLayout steps;
  for (const auto& dim : dims) steps.insert(steps.end(), dim.begin(), dim.end());
  std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
  for (size_t i = 1; i < steps.size(); ++i) {
    if (steps[i].stride < steps[i - 1].size * steps[i - 1].stride) return true;
  }
  return false;
}

} // namespace tessera::internal
