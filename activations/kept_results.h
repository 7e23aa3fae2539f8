#pragma once

// Internal: results of operators that the first run of a function keeps for the second.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/activations/recompute_options.h>
#include <tessera/activations/run_state.h>
#include <tessera/activations/saved_tensor_hooks.h>
#include <tessera/activations/tensor_place.h>
#include <tessera/base/per_thread.h>

namespace tessera::internal {

class KeptResultsScope;

/// The results that one recomputation keeps, by operator and by how many calls of it came before.
class KeptResults {
 public:
  using Scope = KeptResultsScope;
  using Call = std::pair<const c10::FunctionSchema*, size_t>;
  using Values = std::map<Call, std::vector<c10::IValue>>;

  KeptResults(KeepPolicy policy, TensorPlace place) : policy_(std::move(policy)), place_(std::move(place)) {}
  /// What was kept, for a second run.
  Values values() const;

 private:
  friend class KeptResultsScope;
  using SavedVariable = torch::autograd::SavedVariable;
  using Result = std::variant<SavedVariable, c10::IValue>; ///< a tensor, or what is none
  struct Kept {
    std::vector<Result> results;
    RngState rng; ///< after an operator that draws
  };

  KeepPolicy policy_;
  TensorPlace place_;
  std::map<Call, Kept> kept_;
};

/// While it lives, the operators of this thread come here from the fallback of the DTensor key (dtensor/dispatch/fallback.cpp);
/// with null results they do not. The innermost scope counts.
class KeptResultsScope {
 public:
  /// Of a first run; what is around `taker`, the run's own, takes what is kept.
  KeptResultsScope(KeptResults* results, const TakerScope& taker);
  /// Of a second run.
  KeptResultsScope(KeptResults* results, KeptResults::Values values);
  /// Of what is no part of the function: no operator comes here.
  KeptResultsScope() : KeptResultsScope(nullptr) {}
  ~KeptResultsScope();
  KeptResultsScope(const KeptResultsScope&) = delete;
  KeptResultsScope& operator=(const KeptResultsScope&) = delete;

  /// A call that has come below autograd; `keys` are those of what is below.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack);
  /// The innermost that has results to keep or to give; null where none has.
  static KeptResultsScope* active();

 private:
  explicit KeptResultsScope(KeptResults* results);
  void keep(const KeptResults::Call& call, const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack) const;

  KeptResults* results_;
  const ScopedValue<KeptResultsScope*> innermost_;
  const TakerScope* taker_ = nullptr;
  std::optional<KeptResults::Values> values_;
  std::map<const c10::FunctionSchema*, size_t> calls_;
};

} // namespace tessera::internal
