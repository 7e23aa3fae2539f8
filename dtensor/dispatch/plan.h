#pragma once

#include <ATen/core/stack.h>
#include <absl/container/inlined_vector.h>

#include <tessera/dtensor/dispatch/op_info.h>
#include <tessera/dtensor/rules/rule.h>

namespace tessera::dispatch {

/// How to run one call: where each tensor argument has to lie, and what comes out. Made once a cache key.
struct Plan {
  struct Input {
    SpecPtr source;     ///< of a plain tensor that counts as Replicate; null for a DTensor
    SpecPtr target;     ///< null: stays as it is
    bool moves = false; ///< the target's local tensor is another one
  };
  absl::InlinedVector<Input, 4> inputs; ///< one a tensor argument, lists spread, out= arguments included
  std::vector<SpecPtr> ran;             ///< spec of each input as it is run
  std::vector<rules::OutputPlan> outputs;
  bool outputs_unknown = false; ///< replicated, in the shapes that the locals have
  uint64_t plain_outputs = 0;   ///< not wrapped
  bool moves_viewed = false;    ///< a view op whose argument has to move: the result is a copy
  bool on_mesh = true;
};

/// Where a call comes from.
struct Origin {
  /// A derivative formula of autograd, or a decomposition that writes no argument: what it writes are temporaries of its own,
  /// whose placement may change, and the plain tensors that it makes (zeros) are the same on every rank.
  bool own_temporaries = false;
};

/// Sharding propagation for the call at the end of `stack`. Throws where no placement is possible.
Plan make_plan(const c10::OperatorHandle& op, const OpInfo& info, const torch::jit::Stack& stack, size_t begin, Origin origin);

/// Runs the call at the end of `stack` on the local tensors, and puts its results in their place.
void execute(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, torch::jit::Stack* stack);

/// The placements of every input and output, chosen one mesh dim at a time, the cheapest moves first.
struct Chosen {
  std::vector<Placements> inputs, outputs;
};
/// `fixed[i]`: input i is written, so it keeps its placement. `fixed_outputs[r]`: output r goes into a tensor with these
/// placements. `tied[r]`: the input that output r is written into where that may move, or -1: both get the same placements.
Chosen propagate(const rules::OpCall& call, const rules::Factorization& factors, const std::vector<bool>& fixed,
                 const std::vector<const Placements*>& fixed_outputs, const std::vector<int>& tied);

/// Global shape and strides of the outputs, by running the operator on the Meta device; nothing where it has no such kernel.
std::optional<std::vector<rules::Geometry>> infer_outputs(const c10::OperatorHandle& op, const OpInfo& info,
                                                          const torch::jit::Stack& stack, size_t begin);

/// True inside an ImplicitReplication scope of this thread.
bool implicit_replication_enabled();

/// "arguments float[8, 4] (Shard(0)), float[4] (Replicate()) on DeviceMesh(…)", for errors.
std::string describe(const rules::OpCall& call);

} // namespace tessera::dispatch
