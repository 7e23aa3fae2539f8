#pragma once

#include <memory>
#include <utility>

#include <tessera/activations/tensor_place.h>

namespace tessera {

namespace internal {
class PlacedTensors;
}

/// While it lives, what autograd saves for backward on this thread lies in `place` (PyTorch: torch.autograd.graph.
/// saved_tensors_hooks, save_on_cpu). The innermost open scope counts, in whichever order scopes end. Sharded parameters, whose
/// memory is freed between forward and backward anyway, and DTensors stay where they are. Local.
///
/// Where `place` copies, a tensor may be changed in place after it was saved: the values that were saved come back. Otherwise
/// that is an error in backward, as without a scope. So is a tensor that `place` brings back with another shape, dtype or device.
class [[nodiscard]] SavedTensorScope {
 public:
  explicit SavedTensorScope(TensorPlace place);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  std::unique_ptr<internal::PlacedTensors> placed_;
};

/// `const auto scope = tessera::saved_tensors_in(tessera::host_memory());`
inline SavedTensorScope saved_tensors_in(TensorPlace place) { return SavedTensorScope(std::move(place)); }

} // namespace tessera
