#include <tessera/fsdp/options.h>

#include <absl/container/flat_hash_map.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera {

ShardPlacementFn whole_on_one_rank(const std::vector<at::Tensor>& parameters, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks > 0, "whole_on_one_rank: there are ", ranks, " ranks, but must be one at least");
  std::vector<at::Tensor> matrices;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(matrices),
               [](const auto& each) { return each.dim() >= 2; });
  std::stable_sort(matrices.begin(), matrices.end(), [](const auto& a, const auto& b) { return a.numel() > b.numel(); });
  std::vector<int64_t> taken(static_cast<size_t>(ranks), 0);
  absl::flat_hash_map<const c10::TensorImpl*, size_t> owners;
  for (const auto& matrix : matrices) {
    const auto least = std::min_element(taken.begin(), taken.end());
    const bool is_new = owners.emplace(matrix.unsafeGetTensorImpl(), static_cast<size_t>(least - taken.begin())).second;
    if (is_new) *least += matrix.numel();
  }
  return [owners = std::move(owners), ranks](const std::string&, const at::Tensor& parameter) -> std::optional<Placement> {
    const auto found = owners.find(parameter.unsafeGetTensorImpl());
    if (found == owners.end()) return std::nullopt;
    RaggedShard whole;
    whole.extents.append(static_cast<int64_t>(found->second), 0);
    whole.extents.append(1, parameter.size(0));
    whole.extents.append(ranks - static_cast<int64_t>(found->second) - 1, 0);
    return whole;
  };
}

} // namespace tessera
