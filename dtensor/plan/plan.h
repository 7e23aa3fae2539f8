#pragma once

#include <absl/container/inlined_vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/dtensor/calls/call_site.h>
#include <tessera/dtensor/calls/op_info.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::dispatch {

/// What a replicated input becomes that is broadcast over leading dims which a RaggedShard takes as one: the positions of them
/// that this rank holds of the other tensors.
struct Stretch {
  std::vector<int64_t> sizes; ///< of the result; -1 for a dim behind those
  int64_t merged = 0;         ///< how many they are, less one
  Extent part = {};
};

/// How to run one call: where each tensor argument has to lie, and what comes out. Kept by the call's key (fallback.cpp).
struct Plan {
  struct Input {
    SpecPtr source;                         ///< of a plain tensor that counts as Replicate; null for a DTensor
    SpecPtr target;                         ///< null: stays as it is
    std::shared_ptr<const Stretch> stretch; ///< null: it is not stretched
    bool moves = false;                     ///< the target's local tensor is another one
    bool returns = false;                   ///< it is written at the target, and the result goes back to where it lies
    bool joins_norm = false;                ///< it is replicated, and becomes part of a norm, which has no sign
  };
  absl::InlinedVector<Input, 4> inputs; ///< one a tensor argument, lists spread, out= arguments included
  std::vector<SpecPtr> input_specs;     ///< spec of each input as it is run
  std::vector<rules::OutputPlan> outputs;
  rules::Wrapping wrapping;
  bool moves_viewed = false; ///< a view op whose argument has to move: the result is a copy
  bool joins_norms = false;  ///< inputs join a norm: none of them may be negative
  bool by_position = false;  ///< writes a list, and would read what moves as it was before the first write
  bool on_mesh = true;
};

/// Sharding propagation for a call. Throws where no placement is possible.
Plan make_plan(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const CallSite& site);

/// Which placements an input may have.
enum class InputHold : uint8_t {
  kFree,
  kFixed,   ///< it is written where it lies
  kReturns, ///< it is written elsewhere, and what it becomes there goes back
};
/// What binds the placements of an input.
struct InputBound {
  size_t position; ///< among all tensor arguments of the call
  InputHold hold = InputHold::kFree;
};
/// What binds the placements of an output.
struct OutputBound {
  const Placements* fixed = nullptr; ///< those of the tensor that it goes into
  int tied = -1;                     ///< the input that it is written into: both get the same placements
};

/// What binds the placements of a call.
struct Bounds {
  std::vector<InputBound> inputs;
  std::vector<OutputBound> outputs;
  rules::KernelKind kernel = rules::KernelKind::kAnyOffsets; ///< what runs on the locals
  bool keeps_signs = false;                                  ///< a replicated input has negative values
};

/// Replicated inputs that are stretched over the leading dims of input `over`, a RaggedShard on one mesh dim.
struct Stretching {
  rules::IndexSet inputs;
  size_t over = 0, mesh_dim = 0;
};

/// The placements of every input and output.
struct CallPlacements {
  std::vector<Placements> inputs, outputs;
  Stretching stretching;
};
/// Chooses them one mesh dim at a time, the cheapest moves first; nothing where the bounds allow none.
std::optional<CallPlacements> propagate(const rules::OpCall& call, const rules::Factorization& factors, const Bounds& bounds);

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
