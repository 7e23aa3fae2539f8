#include <tessera/activations/saved_tensors.h>

#include <c10/util/Exception.h>

#include <utility>

#include <tessera/activations/placed_tensors.h>

namespace tessera {

SavedTensorScope::SavedTensorScope(TensorPlace place) {
  TORCH_CHECK_VALUE(place, "saved_tensors_in: the place is empty");
  placed_ = std::make_unique<internal::PlacedTensors>(std::move(place));
}

SavedTensorScope::~SavedTensorScope() = default;

} // namespace tessera
