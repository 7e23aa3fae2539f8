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

struct OpenTakers;

/// While it lives, the tensors that autograd saves on this thread go to `taker`; null: they stay with autograd. The innermost
/// open scope counts. They may end in any order, and on any thread.
class TakerScope {
 public:
  explicit TakerScope(SavedTensorTaker* taker);
  ~TakerScope();
  TakerScope(const TakerScope&) = delete;
  TakerScope& operator=(const TakerScope&) = delete;

  /// Whom the scope takes the place of.
  SavedTensorTaker* before() const;

 private:
  std::shared_ptr<OpenTakers> open_; ///< of the thread that it began on
};

} // namespace tessera::internal
