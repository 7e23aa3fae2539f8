#include <tessera/optim/parts/optimizer_ranks.h>

#include <set>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

std::vector<int64_t> ranks_of(const torch::optim::Optimizer& optimizer) {
  std::set<int64_t> ranks;
  const DeviceMesh* last = nullptr;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* meta = dtensor_meta(parameter);
      if (!meta || &meta->spec->mesh() == last) continue;
      last = &meta->spec->mesh();
      ranks.insert(last->ranks().begin(), last->ranks().end());
    }
  }
  return {ranks.begin(), ranks.end()};
}

} // namespace tessera::internal
