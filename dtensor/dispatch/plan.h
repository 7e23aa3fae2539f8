#pragma once

#include <ATen/core/stack.h>
#include <absl/container/inlined_vector.h>

#include <cstdint>

#include <tessera/dtensor/dispatch/call_site.h>
#include <tessera/dtensor/dispatch/op_info.h>
#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::dispatch {

/// How to run one call: where each tensor argument has to lie, and what comes out. Kept by the call's key (fallback.cpp).
struct Plan {
  struct Input {
    SpecPtr source;          ///< of a plain tensor that counts as Replicate; null for a DTensor
    SpecPtr target;          ///< null: stays as it is
    bool moves = false;      ///< the target's local tensor is another one
    bool joins_norm = false; ///< it is replicated, and becomes part of a norm, which has no sign
  };
  absl::InlinedVector<Input, 4> inputs; ///< one a tensor argument, lists spread, out= arguments included
  std::vector<SpecPtr> ran;             ///< spec of each input as it is run
  std::vector<rules::OutputPlan> outputs;
  rules::Wrapping wrapping;
  bool moves_viewed = false; ///< a view op whose argument has to move: the result is a copy
  bool joins_norms = false;  ///< inputs join a norm: none of them may be negative
  bool on_mesh = true;
};

/// Sharding propagation for a call. Throws where no placement is possible.
Plan make_plan(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const CallSite& site);

/// Runs the call at the end of `stack` on the local tensors, and puts its results in their place.
void execute(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, torch::jit::Stack* stack);

/// What binds the placements of an input.
struct InputBound {
  size_t position;    ///< among all tensor arguments of the call
  bool fixed = false; ///< it is written where it lies
};
/// What binds the placements of an output.
struct OutputBound {
  const Placements* fixed = nullptr; ///< those of the tensor that it goes into
  int tied = -1;                     ///< the input that it is written into where that may move: both get the same placements
};

/// What binds the placements of a call.
struct Bounds {
  std::vector<InputBound> inputs;
  std::vector<OutputBound> outputs;
  rules::KernelKind kernel = rules::KernelKind::kAnyOffsets; ///< what runs on the locals
  bool keeps_signs = false;                                  ///< a replicated input has negative values
};

/// The placements of every input and output.
struct CallPlacements {
  std::vector<Placements> inputs, outputs;
};
/// Chooses them one mesh dim at a time, the cheapest moves first.
CallPlacements propagate(const rules::OpCall& call, const rules::Factorization& factors, const Bounds& bounds);

/// What stands in for a call's tensors where only the shape of its results is asked for.
enum class StandIn : uint8_t {
  kMeta,
  kZeros, ///< of the host, without memory for PyTorch's own kernels: on ranks that compute nothing else
};

/// Global shape and strides of the outputs, by running the operator on stand-ins; nothing where it has no kernel for them. Of
/// zeros the undefined ones too, without sizes.
std::optional<std::vector<rules::Geometry>> infer_outputs(const c10::OperatorHandle& op, const OpInfo& info,
                                                          c10::ArrayRef<c10::IValue> arguments,
                                                          StandIn stand_in = StandIn::kMeta);

/// "arguments float[8, 4] (Shard(0)), float[4] (Replicate()) on DeviceMesh(…)", for errors.
std::string describe(const rules::OpCall& call);

} // namespace tessera::internal::dispatch
