#pragma once

#include <memory>
#include <utility>

#include <tessera/activations/tensor_place.h>

namespace tessera {

namespace internal {
class PlacedTensors;
}

/// While it lives, the tensors that autograd saves for backward on this thread are stored in `place` (PyTorch: torch.autograd.
/// graph.saved_tensors_hooks, save_on_cpu). The innermost open scope applies; scopes may end in any order. Sharded parameters,
/// whose memory is freed between forward and backward anyway, and DTensors stay where they are. Local.
///
/// If `place` copies, a tensor may be changed in place after it was saved: the saved values come back. Otherwise that is an error
/// in backward, as without a scope. A tensor that `place` brings back with another shape, dtype or device is an error too.
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
