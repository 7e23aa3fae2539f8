#pragma once

// Internal: a call that reads tensors which are seen when they are read.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <absl/container/inlined_vector.h>

#include <optional>
#include <span>

#include <tessera/dtensor/calls/call_origin.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/reads/kind.h>
#include <tessera/reads/operator_traits.h>

namespace tessera::internal {

/// The call at the end of a stack, once it has come to the key above autograd. The kinds that it met run one after another, then
/// the operator.
class ReadCall {
 public:
  /// `keys`: those of the call, as the dispatcher gives them.
  ReadCall(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* arguments_and_results);

  /// Runs the next kind that the call met, or the operator where there is none. The results are at the end of the stack then.
  void proceed();

  bool met(Met what) const { return met_.contains(what); }
  /// Whether it met one of `what`.
  bool met_any(MetSet what) const { return met_.has_any(what); }
  /// Where the call comes from; autograd is asked once.
  CallOrigin origin() {
    if (!origin_) origin_ = call_origin();
    return *origin_;
  }

  /// Puts `replacement(tensor, argument)`, an optional tensor, in the place of each tensor among the arguments. The call meets
  /// the kind of a DTensor that comes in so.
  template <typename Replacement>
  void replace(const Replacement& replacement) {
    dispatch::replace_tensors(traits, arguments, [&](const at::Tensor& tensor, size_t argument) {
      std::optional<at::Tensor> taken = replacement(tensor, argument);
      if (taken) meet_kind_of(*taken);
      return taken;
    });
  }
  /// Leaves the first `count` arguments in the place of results, without a call of the operator.
  void return_arguments(size_t count) { stack->resize(stack->size() - traits.arguments.size() + count); }

  const c10::OperatorHandle& op;
  const OperatorTraits& traits;
  torch::jit::Stack* const stack;
  const std::span<c10::IValue> arguments; ///< on the stack, until the operator has run
  c10::DispatchKeySet below;              ///< keys with which the operator runs

 private:
  void look();
  void meet_kind_of(const at::Tensor& tensor) {
    if (const auto* meta = read_meta(tensor)) add(*meta->kind);
  }
  void add(const ReadKind& kind);

  MetSet met_;
  std::optional<CallOrigin> origin_;
  absl::InlinedVector<const ReadKind*, 2> kinds_; ///< in the order of their turns
  size_t next_ = 0;                               ///< of `kinds_`
};

/// The fallback of the key above autograd: the call at the end of `stack`.
void on_read(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace tessera::internal
