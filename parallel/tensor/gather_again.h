#pragma once

// Internal: what autograd keeps of an activation that was gathered for a layer.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include <tessera/activations/saved_tensor_hooks.h>

namespace tessera::internal::parallel {

/// While it lives, autograd keeps this rank's part of an activation, `source`, in the place of the whole, `gathered`, or a view
/// of it, which it saves for the gradient of the weight. Backward gathers it again. So sequence parallelism keeps 1/n of each
/// activation, at the price of an all-gather a layer, as Megatron does. Where somebody else takes what autograd saves, as
/// `recompute` does, that one gets the whole.
class GatherAgain final : public SavedTensorTaker {
 public:
  GatherAgain(const at::Tensor& source, const at::Tensor& gathered, std::string label);
  std::unique_ptr<torch::autograd::SavedVariableHooks> take() override;

  struct Activation;
  /// What a backward gathers again; null where somebody else takes what autograd saves.
  std::shared_ptr<const Activation> activation() const { return other_ ? nullptr : activation_; }

 private:
  std::shared_ptr<const Activation> activation_;
  TakerScope scope_{this};
  SavedTensorTaker* const other_ = scope_.before(); ///< asked here: takers are called under the lock of their scopes
};

/// In a backward: starts to gather the activation again. What autograd saved of it waits for that when it is asked for.
void start_gathering_again(const GatherAgain::Activation& activation);

} // namespace tessera::internal::parallel
