#pragma once

// Internal: what a sharding rule says about one operator call, as data. The engine (plan/propagate.cpp) derives the
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
#include <utility>
#include <variant>
#include <vector>

#include <tessera/dtensor/rules/sets.h>
#include <tessera/dtensor/spec.h>

namespace tessera::internal::rules {

/// A tensor dim that belongs to no factor: it must not be split.
inline constexpr int kNoFactor = -1;

/// The size of a whole dim of a result that is known once the operator has run.
inline constexpr int64_t kUnknownSize = -1;

/// The dims of one tensor: the factor of each, and its global size.
struct TensorDims {
  absl::InlinedVector<int, 6> factors;
  std::vector<int64_t> sizes;

  void add(int factor, int64_t size) {
    factors.push_back(factor);
    sizes.push_back(size);
  }
};

/// How a factor may be split.
enum class SplitLimit : uint8_t {
  kAny,
  kEven,     ///< the ranks must divide it: part of a dim that is split or merged by a view
  kNonEmpty, ///< every rank must have some of it: kernels refuse, or may refuse, tensors without elements
};

/// A loop of the operator. Splitting it gives Shard to every tensor that has it, Replicate to every other input, and
/// `reduction` to an output that lacks it (without one: such a split is impossible).
struct Factor {
  int64_t size = 0;
  std::optional<Placement> reduction = {}; ///< a Partial; Replicate where the kernel on the locals sees to that
  SplitLimit limit = SplitLimit::kAny;
};

using OpSet = EnumSet<Partial::Op>;
inline constexpr OpSet kLinearOps{Partial::Op::kSum, Partial::Op::kAvg};
inline constexpr OpSet kOrderOps{Partial::Op::kMin, Partial::Op::kMax};
inline constexpr OpSet kScaleOps = kLinearOps | Partial::Op::kMask; ///< linear, element by element
inline constexpr OpSet kAllOps = kScaleOps | kOrderOps | OpSet{Partial::Op::kProduct, Partial::Op::kNorm};

/// The inputs in `inputs` may be Partial with one of `ops`, all others Replicate; every output then is Partial
/// alike. A MaskPartial that is not among `ops` counts as a sum.
struct PartialFlow {
  IndexSet inputs;
  OpSet ops;
};

/// A placement of input 0 that an operator turns into others of its outputs (one for all, or one each), beyond what factors
/// express; nothing where it does not. `others`: the input's placements on the other mesh dims; `ranks` of this one.
using PlacementMap = std::function<std::vector<Placement>(const Placement& input, const Placements& others, int64_t ranks)>;

/// The dims over which a RaggedShard may be used as Shard(0) may.
enum class RaggedUse : uint8_t {
  kNone,
  kRows,        ///< over dim 0
  kMerged,      ///< over several leading dims too: right on locals in which these are merged, wherever the locals start
  kElementwise, ///< the same, and the inputs are broadcast: one that reaches into merged dims is stretched over them
  kReduced,     ///< over several leading dims too, of which the outputs lack some: the kernel completes the rows of a local
};

/// How the results on the locals become DTensors.
struct Wrapping {
  enum Shapes : uint8_t { kPlanned, kOfLocals } shapes = kPlanned; ///< kOfLocals: all is whole, known once the operator has run
  IndexSet plain; ///< outputs that stay plain tensors of each rank: what only a backward kernel reads
};

/// One operator call in factors.
struct Factorization {
  absl::InlinedVector<TensorDims, 4> inputs; ///< one a tensor argument, lists spread; out= arguments left out
  absl::InlinedVector<TensorDims, 2> outputs;
  absl::InlinedVector<Factor, 8> factors;
  absl::InlinedVector<PartialFlow, 2> partial;
  IndexSet additive; ///< inputs that are added to the result: Partial(sum) where the output is
  RaggedUse ragged = RaggedUse::kRows;
  Wrapping wrapping;
  std::vector<int64_t> strides; ///< of output 0, where they are not contiguous and the operator does not tell them
  PlacementMap map;             ///< optional
  bool map_all = false;         ///< where `map` is used, every input lies as input 0 does

  int add_factor(int64_t size) {
    factors.push_back({size});
    return static_cast<int>(factors.size()) - 1;
  }
  /// An output that is Partial where `givers` are, with any of `ops`.
  void add_output(TensorDims dims, OpSet ops, IndexSet givers = {0}) {
    outputs.push_back(std::move(dims));
    partial.push_back({givers, ops});
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
  /// `dim` in 0..ndim-1, where a negative one counts from the end; an error when it is out of range.
  int64_t wrap_dim(int64_t dim, int64_t ndim) const;
  /// A dim argument in 0..ndim-1.
  int64_t dim(std::string_view argument, int64_t ndim, int64_t otherwise = 0) const;
  /// Which dims of input 0 an int[] or int argument names; none when it is missing or None.
  std::vector<bool> named_dims(std::string_view argument) const;
  /// Number of tensors that the call returns.
  size_t output_count() const;
};

struct OutputPlan {
  Placements placements;
  std::vector<int64_t> sizes;
  std::optional<std::vector<int64_t>> strides; ///< none: nothing tells them, and the result is laid out in `format`
  std::vector<int64_t> local_sizes;
  at::ScalarType dtype = at::kFloat; ///< as far as known before the first run
  SpecPtr spec;                      ///< of the result seen last; interned at the first run
  at::MemoryFormat format =
      at::MemoryFormat::Contiguous; ///< of the first output: channels last where an input is; the same on all ranks
};

/// A call on the local tensors: the operator's arguments are the last `arguments` of the stack.
struct LocalCall {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue>* stack;
  const std::vector<OutputPlan>& outputs;
  const std::vector<SpecPtr>& inputs; ///< spec of each tensor argument as it is run; null for plain or undefined
  bool& copies_view;                  ///< set where the result of a view operator is a copy
  size_t begin() const;               ///< index of the first argument in the stack
  c10::IValue& arg(size_t i) const { return (*stack)[begin() + i]; }
  /// The argument called `argument`; null when the overload has none.
  c10::IValue* find(std::string_view argument) const;
  /// Replaces the arguments by `result`.
  void finish(c10::IValue result) const;
  /// Finishes with a tensor, through the out= argument where the overload has one.
  void finish_out(const at::Tensor& result) const;
};

using Factorize = std::function<Factorization(const OpCall&)>;
/// Runs on the locals in the stack, in place of the operator itself.
using LocalKernel = void (*)(const LocalCall&);
enum class KernelKind : uint8_t {
  kAnyOffsets,  ///< it takes locals wherever they start, as the operator itself does
  kAsksOffsets, ///< no StridedShard, which has no single start; unless RaggedUse::kMerged
  kCopiesView,  ///< any offsets, and the result of a view operator is a copy
};

/// What else the engine does for a rule.
enum class Trait : uint8_t {
  kListElements,     ///< `factorize` describes the i-th elements of the lists
  kStaticScalars,    ///< the placements depend on Scalar and float arguments too
  kPlainIsReplicate, ///< plain tensors of any shape count as Replicate
  kOwnEmptyShapes,   ///< without elements the kernel for Meta gives other shapes than the others
};
using Traits = EnumSet<Trait>;

/// The inputs are moved to where `factorize` allows, and the operator runs on the local tensors, or a kernel in its place.
struct OnLocals {
  explicit OnLocals(Factorize factors) : factorize(std::move(factors)) {}
  OnLocals run(LocalKernel own_kernel, KernelKind own_kind = KernelKind::kAsksOffsets) && {
    kernel = own_kernel;
    kind = own_kind;
    return std::move(*this);
  }
  OnLocals with(Traits given) && {
    traits = given;
    return std::move(*this);
  }

  Factorize factorize;
  LocalKernel kernel = nullptr; ///< unset: the operator itself
  KernelKind kind = KernelKind::kAnyOffsets;
  Traits traits;
};

/// Takes over the whole call: the stack holds the DTensors.
using Handler = void (*)(const c10::OperatorHandle&, std::vector<c10::IValue>*);

/// Runs the operator's own composite kernel on the DTensors.
struct Decompose {};

/// How a call runs: on the local tensors, or by kernels that see the DTensors.
using Rule = std::variant<OnLocals, Handler, Decompose>;

} // namespace tessera::internal::rules
