#pragma once

// Internal: autograd's saved tensors in a place that the program chose.

#include <memory>

#include <tessera/activations/saved_tensor_hooks.h>
#include <tessera/activations/tensor_place.h>

namespace tessera::internal {

/// While it lives, what autograd saves on this thread goes to a place.
class PlacedTensors final : public SavedTensorTaker {
 public:
  explicit PlacedTensors(TensorPlace place);
  std::unique_ptr<torch::autograd::SavedVariableHooks> take() override;

 private:
  std::shared_ptr<const TensorPlace> place_;
  TakerScope scope_{this};
};

} // namespace tessera::internal
