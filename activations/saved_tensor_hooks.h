#pragma once

// Internal: who takes the tensors that autograd saves for backward on this thread.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera::internal {

/// Takes tensors in the place of autograd.
class SavedTensorTaker {
 public:
  virtual ~SavedTensorTaker() = default;
  /// Called once for each tensor that autograd saves.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> take() = 0;
};

/// While it lives, the tensors that autograd saves on this thread go to `taker`; null: they stay with autograd. The innermost
/// scope counts.
class TakerScope {
 public:
  explicit TakerScope(SavedTensorTaker* taker);
  ~TakerScope();
  TakerScope(const TakerScope&) = delete;
  TakerScope& operator=(const TakerScope&) = delete;

  /// Whom the scope took the place of.
  SavedTensorTaker* before() const { return before_; }

 private:
  SavedTensorTaker* before_;
};

} // namespace tessera::internal
