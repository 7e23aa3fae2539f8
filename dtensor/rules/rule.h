#pragma once

// Internal: what a sharding rule says about one operator call, as data. The engine (dispatch/propagate.cpp) derives the
// placements.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <absl/container/inlined_vector.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/dtensor/spec.h>

namespace tessera::rules {

/// A tensor dim that belongs to no factor: it must not be split.
inline constexpr int kNoFactor = -1;

/// The size of a whole dim of a result that is known once the operator has run.
inline constexpr int64_t kUnknownSize = -1;

/// The dims of one tensor: the factor of each, and its global size.
struct TensorDims {
  absl::InlinedVector<int, 6> factors;
  std::vector<int64_t> sizes;
};

/// A loop of the operator. Splitting it gives Shard to every tensor that has it, Replicate to every other input, and
/// `reduction` to an output that lacks it (without one: such a split is impossible).
struct Factor {
  int64_t size = 0;
  std::optional<Partial> reduction;
  /// Part of a dim that is split or merged by a view: the ranks must divide it.
  bool even_only = false;
  /// The operator's kernels refuse, or may refuse, tensors without elements: split only where every rank has some.
  bool no_empty = false;
  /// An output that lacks it is Replicate all the same: the kernel on the locals sees to that.
  bool absent_is_replicate = false;
};

using OpSet = uint8_t; ///< one bit a Partial::Op
constexpr OpSet ops(std::initializer_list<Partial::Op> list) {
  OpSet set = 0;
  for (const auto op : list) set |= static_cast<OpSet>(1u << static_cast<int>(op));
  return set;
}
inline constexpr OpSet kLinearOps = ops({Partial::Op::kSum, Partial::Op::kAvg});
inline constexpr OpSet kOrderOps = ops({Partial::Op::kMin, Partial::Op::kMax});
inline constexpr OpSet kScaleOps = kLinearOps | ops({Partial::Op::kMask}); ///< linear, element by element
inline constexpr OpSet kAllOps = 0x7f;

/// The inputs in `inputs` (bit i: input i) may be Partial with one of `ops`, all others Replicate; every output then is Partial
/// alike. A MaskPartial that is not among `ops` counts as a sum.
struct PartialFlow {
  uint64_t inputs = 0;
  OpSet ops = 0;
  bool output_is_replicate = false; ///< the values do not matter (zeros_like)
};
inline constexpr uint64_t kEveryInput = ~uint64_t{0};

/// A placement of input 0 that an operator turns into others of its outputs (one for all, or one each), beyond what factors
/// express; nothing where it does not. `others`: the input's placements on the other mesh dims; `ranks` of this one.
using PlacementMap = std::function<std::vector<Placement>(const Placement& input, const Placements& others, int64_t ranks)>;

/// One operator call in factors.
struct Factorization {
  absl::InlinedVector<TensorDims, 4> inputs; ///< one a tensor argument, lists spread; out= arguments left out
  absl::InlinedVector<TensorDims, 2> outputs;
  absl::InlinedVector<Factor, 8> factors;
  absl::InlinedVector<PartialFlow, 2> partial;
  uint64_t additive = 0;        ///< inputs that are added to the result: Partial(sum) where the output is
  bool merges_leading = false;  ///< right also on locals whose leading dims are merged (RaggedShard over several dims)
  bool asks_offsets = false;    ///< the rule's own kernel asks where the locals start: no StridedShard
  bool leading_whole = true;    ///< RaggedShard over dim 0 may be used as Shard(0) may
  bool outputs_unknown = false; ///< everything is whole, and the outputs' shapes are known once the operator has run
  uint64_t plain_outputs = 0;   ///< outputs that stay plain tensors of each rank: what only a backward kernel reads
  std::vector<int64_t> strides; ///< of output 0, where they are not contiguous and the operator does not tell them
  PlacementMap map;             ///< optional

  int add_factor(int64_t size) {
    factors.push_back({size});
    return static_cast<int>(factors.size()) - 1;
  }
};

/// One tensor argument (or element of a list argument) of a call.
struct TensorArg {
  size_t argument;
  int64_t index; ///< in its list; -1 for a plain argument
  bool defined;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  SpecPtr spec; ///< Replicate for a plain tensor that counts as such; null when undefined
};

/// Global shape, strides and dtype of an output.
struct Geometry {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

/// The global view of a call: what a rule reads.
struct OpCall {
  const std::string& name; ///< "aten::add.Tensor"
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> args;
  std::vector<TensorArg> tensors; ///< without out= arguments
  DeviceMesh mesh;
  const std::vector<Geometry>* outputs = nullptr; ///< of new outputs, where the operator tells without running

  /// The argument called `argument`; null IValue pointer when the overload has none.
  const c10::IValue* find(std::string_view argument) const;
  /// Its value, or `otherwise` when it is missing or None.
  int64_t integer(std::string_view argument, int64_t otherwise) const;
  bool flag(std::string_view argument, bool otherwise) const;
  /// An int[] or int argument as a list; empty when missing or None.
  std::vector<int64_t> integers(std::string_view argument) const;
  /// A dim argument in 0..ndim-1.
  int64_t dim(std::string_view argument, int64_t ndim, int64_t otherwise = 0) const;
  /// Number of tensors that the call returns.
  size_t output_count() const;
};

struct OutputPlan {
  Placements placements;
  std::vector<int64_t> sizes, strides, local_sizes;
  at::ScalarType dtype = at::kFloat; ///< as far as known before the first run
  SpecPtr spec;                      ///< with the dtype seen last; interned at the first run
};

/// A call on the local tensors: the operator's arguments are the last `arguments` of the stack.
struct LocalCall {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue>* stack;
  const std::vector<OutputPlan>& outputs;
  const std::vector<SpecPtr>& inputs; ///< spec of each tensor argument as it is run; null for plain or undefined
  size_t begin() const;               ///< index of the first argument in the stack
  c10::IValue& arg(size_t i) const { return (*stack)[begin() + i]; }
  int find(std::string_view argument) const; ///< its position, or -1
  /// Replaces the arguments by `result`.
  void finish(c10::IValue result) const;
};

using Factorize = std::function<Factorization(const OpCall&)>;
/// Runs the operator on the locals in the stack, in place of the operator itself.
using LocalKernel = void (*)(const LocalCall&);
/// Takes over the whole call: the stack holds the DTensors.
using Handler = void (*)(const c10::OperatorHandle&, std::vector<c10::IValue>*);

struct Rule {
  Factorize factorize;         ///< unset: `handler` does it all
  LocalKernel local = nullptr; ///< unset: the operator itself
  Handler handler = nullptr;
  bool foreach = false;            ///< `factorize` describes the i-th elements of the lists
  bool static_scalars = false;     ///< the placements depend on Scalar and float arguments too
  bool plain_is_replicate = false; ///< plain tensors of any shape count as Replicate
  bool view = false;               ///< no rule for the in-place variant, which changes a tensor's own shape
  bool ignores_offsets = false;    ///< `local` does not ask where the locals start
  bool copies = false;             ///< a view operator whose result is a copy
  bool decompose = false;          ///< run the operator's CompositeExplicitAutograd kernel on the DTensors
};

} // namespace tessera::rules
