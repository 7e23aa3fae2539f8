#include <absl/strings/ascii.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/plan/plan.h>
#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal::dispatch {

namespace {

using rules::Factorization;
using rules::OpCall;
using rules::PartialFlow;
using rules::RaggedUse;
using rules::TensorDims;

using PlacedTensors = absl::InlinedVector<Placement, 4>;

/// One way to run the operator on one mesh dim.
struct Signature {
  PlacedTensors inputs, outputs;
  rules::IndexSet stretched; ///< inputs that are stretched over the dims of a RaggedShard
};

class Search {
 public:
  Search(const OpCall& call, const Factorization& factors, const Bounds& bounds)
      : call_(call), factors_(factors), bounds_(bounds), splits_(factors.factors.size(), 1) {
    chosen_.inputs.resize(factors.inputs.size());
    chosen_.outputs.resize(factors.outputs.size());
  }

  std::optional<CallPlacements> run() {
    for (mesh_dim_ = 0; mesh_dim_ < static_cast<size_t>(call_.mesh.ndim()); ++mesh_dim_) {
      if (!choose()) return std::nullopt;
    }
    return std::move(chosen_);
  }

 private:
  int64_t ranks() const { return call_.mesh.size(static_cast<int64_t>(mesh_dim_)); }
  const Placement* current(size_t input) const {
    const auto& spec = call_.tensors[input].spec;
    return spec ? &spec->placements()[mesh_dim_] : nullptr;
  }

  /// Whether there is a way on this mesh dim.
  bool choose() {
    best_cost_ = std::numeric_limits<double>::infinity();
    best_factor_ = -1;
    consider(replicated(), -1);
    for (size_t f = 0; f < factors_.factors.size(); ++f) split(static_cast<int>(f));
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      const auto* strided = current(i) ? std::get_if<StridedShard>(current(i)) : nullptr;
      if (strided) split_strided(factors_.inputs[i].factors[strided->dim], strided->split_factor);
    }
    for (const auto& flow : factors_.partial) flow_through(flow);
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      if (const auto* ragged = current(i) ? std::get_if<RaggedShard>(current(i)) : nullptr) split_leading(i, *ragged);
    }
    if (factors_.map && current(0)) mapped();
    if (best_cost_ == std::numeric_limits<double>::infinity()) return false;
    for (size_t i = 0; i < best_.inputs.size(); ++i) chosen_.inputs[i].push_back(best_.inputs[i]);
    for (size_t r = 0; r < best_.outputs.size(); ++r) chosen_.outputs[r].push_back(best_.outputs[r]);
    if (best_factor_ >= 0) splits_[best_factor_] *= ranks();
    if (best_.stretched != rules::IndexSet{}) chosen_.stretching = {best_.stretched, best_source_, mesh_dim_};
    return true;
  }

  Signature replicated() const { return {PlacedTensors(factors_.inputs.size()), PlacedTensors(factors_.outputs.size())}; }

  static int dim_of(const TensorDims& tensor, int factor) {
    for (size_t d = 0; d < tensor.factors.size(); ++d) {
      if (tensor.factors[d] == factor) return static_cast<int>(d);
    }
    return -1;
  }

  /// Sets the outputs without the split dims, and what is added to them, to Partial.
  bool reduce_outputs(Signature& signature, const std::vector<bool>& has, const rules::Factor& factor) const {
    const auto& reduction = factor.reduction;
    bool reduced = false;
    for (size_t r = 0; r < has.size(); ++r) {
      if (has[r] || factors_.wrapping.plain.contains(r)) continue;
      if (!reduction) return false;
      signature.outputs[r] = *reduction;
      reduced |= is_partial(*reduction);
    }
    for (size_t i = 0; reduced && i < signature.inputs.size(); ++i) {
      if (factors_.additive.contains(i)) signature.inputs[i] = *reduction;
    }
    return true;
  }

  /// Some rank would get nothing of a dim of `size` that earlier mesh dims split over `splits`.
  bool leaves_empty(int64_t size, int64_t splits) const {
    if (splits > 1) return size % (splits * ranks()) != 0;
    return chunk_extent(size, ranks(), ranks() - 1).size == 0;
  }

  void split(int f) {
    const auto& factor = factors_.factors[f];
    if (factor.limit == rules::SplitLimit::kEven && factor.size % (splits_[f] * ranks()) != 0) return;
    if (factor.limit == rules::SplitLimit::kNonEmpty && leaves_empty(factor.size, splits_[f])) return;
    split(f, [](int dim) { return Shard{dim}; });
  }

  /// A factor may be split in any way by kernels that do not ask where a local tensor starts.
  void split_strided(int f, int64_t split_factor) {
    const bool asks_offsets = bounds_.kernel == rules::KernelKind::kAsksOffsets;
    const bool any_start = factors_.ragged == RaggedUse::kMerged || factors_.ragged == RaggedUse::kElementwise;
    if (f == rules::kNoFactor || (asks_offsets && !any_start)) return;
    if (factors_.factors[f].limit != rules::SplitLimit::kAny) return;
    split(f, [split_factor](int dim) { return StridedShard{dim, split_factor}; });
  }

  template <typename Split>
  void split(int f, const Split& placement) {
    auto signature = replicated();
    bool used = false;
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      const int dim = dim_of(factors_.inputs[i], f);
      if (dim >= 0) signature.inputs[i] = placement(dim);
      used |= dim >= 0;
    }
    std::vector<bool> has(factors_.outputs.size());
    for (size_t r = 0; r < has.size(); ++r) {
      const int dim = dim_of(factors_.outputs[r], f);
      has[r] = dim >= 0;
      if (has[r]) signature.outputs[r] = placement(dim);
    }
    if (used && reduce_outputs(signature, has, factors_.factors[f])) consider(signature, f);
  }

  void flow_through(const PartialFlow& flow) {
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      const auto* partial = current(i) ? std::get_if<Partial>(current(i)) : nullptr;
      if (!partial) continue;
      const bool passed = flow_through(flow, *partial);
      const bool passed_as_sum = same_value(*partial, Partial{}) && flow_through(flow, Partial{});
      if (!passed && !passed_as_sum) continue;
      if (flow.inputs == rules::kEveryInput) return; // the first Partial among many inputs decides
    }
  }

  /// What is split becomes a part of an average by a factor of the number of ranks, which its type may not hold.
  bool may_overflow(size_t input, const Partial& partial) const {
    if (partial.op != Partial::Op::kAvg || !current(input) || !is_sharded(*current(input))) return false;
    const auto dtype = call_.tensors[input].dtype;
    return dtype == at::kHalf || !(at::isFloatingType(dtype) || at::isComplexType(dtype));
  }

  /// A norm has no sign, which any other tensor may have. Of a replicated one the ranks can tell, before the plan is run.
  bool loses_sign(size_t input, const Partial& partial) const {
    if (partial.op != Partial::Op::kNorm || !current(input) || *current(input) == Placement(partial)) return false;
    return bounds_.keeps_signs || !call_.tensors[input].spec->is_replicated();
  }

  /// Whether every result is a truth value: a new one as the operator tells, another as what it goes into.
  bool gives_truths() const {
    const auto is_truth = [](const auto& value) { return value.dtype == at::kBool; };
    if (call_.outputs) return std::all_of(call_.outputs->begin(), call_.outputs->end(), is_truth);
    for (size_t i = 0; i < call_.args.size(); ++i) {
      const auto* alias = call_.schema.arguments()[i].alias_info();
      if (alias && alias->isWrite() && call_.args[i].isTensor()) return call_.args[i].toTensor().scalar_type() == at::kBool;
    }
    return false;
  }

  /// An average of whole numbers is not defined, and a sum of truth values is "or": arithmetic with the parts is not arithmetic
  /// with what they reduce to. A flow that keeps a minimum as well only moves values.
  bool is_not_linear(size_t input, const PartialFlow& flow, const Partial& partial) const {
    if (flow.ops.contains(Partial::Op::kMin) || !current(input) || *current(input) != Placement(partial)) return false;
    const auto dtype = call_.tensors[input].dtype;
    if (partial.op == Partial::Op::kAvg) return !at::isFloatingType(dtype) && !at::isComplexType(dtype);
    return partial.op == Partial::Op::kSum && dtype == at::kBool && !gives_truths();
  }

  bool flow_through(const PartialFlow& flow, const Partial& partial) {
    if (!flow.ops.contains(partial.op)) return false;
    auto signature = replicated();
    for (size_t k = 0; k < signature.inputs.size(); ++k) {
      const bool takes_part = flow.inputs.contains(k);
      if (takes_part && (may_overflow(k, partial) || loses_sign(k, partial) || is_not_linear(k, flow, partial))) return false;
      if (takes_part) signature.inputs[k] = partial;
    }
    for (auto& output : signature.outputs) output = partial;
    consider(signature, -1);
    return true;
  }

  enum class Leading { kAll, kNone, kMixed };
  static Leading leading(const TensorDims& tensor, const absl::InlinedVector<int, 6>& group) {
    const bool all = tensor.factors.size() >= group.size() && std::equal(group.begin(), group.end(), tensor.factors.begin());
    if (all) return Leading::kAll;
    for (const auto factor : group) {
      if (factor != rules::kNoFactor && dim_of(tensor, factor) >= 0) return Leading::kMixed;
    }
    return Leading::kNone;
  }

  /// A range of a part need not be one of the tensor: rules that ask where it starts do not take it.
  bool takes(const RaggedShard& ragged, size_t source) const {
    const bool any_start = factors_.ragged == RaggedUse::kMerged || factors_.ragged == RaggedUse::kElementwise;
    if (is_nested(call_.tensors[source].spec->placements()) && !any_start) return false;
    return ragged.dim > 0 ? factors_.ragged > RaggedUse::kRows : factors_.ragged != RaggedUse::kNone;
  }

  /// Gives `ragged` to the inputs with all the factors of `group`. Of the others, those that are broadcast against merged dims
  /// and reach into them are stretched.
  bool split_inputs(Signature& signature, const RaggedShard& ragged, const absl::InlinedVector<int, 6>& group, size_t ndim) {
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      const auto& tensor = factors_.inputs[i];
      const auto kind = leading(tensor, group);
      const bool reaches_in = ragged.dim > 0 && tensor.sizes.size() + ragged.dim > ndim;
      if (kind == Leading::kAll) {
        signature.inputs[i] = ragged;
      } else if (kind == Leading::kMixed || reaches_in) {
        if (factors_.ragged != RaggedUse::kElementwise || tensor.sizes.size() > ndim) return false;
        signature.stretched = signature.stretched.with(i);
      }
    }
    return true;
  }

  /// Input `source` is a RaggedShard: every tensor with the same leading factors is split alike.
  void split_leading(size_t source, const RaggedShard& ragged) {
    if (!takes(ragged, source)) return;
    const auto& dims = factors_.inputs[source].factors;
    const absl::InlinedVector<int, 6> group(dims.begin(), dims.begin() + ragged.dim + 1);
    rules::Factor reduced;
    for (const auto f : group) {
      if (f == rules::kNoFactor || factors_.factors[f].limit != rules::SplitLimit::kAny) return;
      if (!reduced.reduction) reduced = factors_.factors[f];
    }
    auto signature = replicated();
    if (!split_inputs(signature, ragged, group, dims.size())) return;
    std::vector<bool> has(factors_.outputs.size());
    for (size_t r = 0; r < has.size(); ++r) {
      const auto kind = leading(factors_.outputs[r], group);
      if (kind == Leading::kMixed && factors_.ragged != RaggedUse::kReduced) return;
      has[r] = kind == Leading::kAll;
      if (has[r]) signature.outputs[r] = ragged;
    }
    if (reduce_outputs(signature, has, reduced) && consider(signature, -1)) best_source_ = source;
  }

  void mapped() {
    Placements others;
    for (size_t m = 0; m < call_.tensors[0].spec->placements().size(); ++m) {
      if (m != mesh_dim_) others.push_back(call_.tensors[0].spec->placements()[m]);
    }
    const auto results = factors_.map(*current(0), others, ranks());
    if (results.empty()) return;
    auto signature = replicated();
    signature.inputs[0] = *current(0);
    if (factors_.map_all) std::fill(signature.inputs.begin(), signature.inputs.end(), *current(0));
    for (size_t r = 0; r < signature.outputs.size(); ++r) signature.outputs[r] = results.size() == 1 ? results[0] : results[r];
    consider(signature, -1);
  }

  /// Whether a tensor of `sizes` may have `placement` beside those that are chosen on the mesh dims before.
  bool compatible(const std::vector<int64_t>& sizes, const Placements& outer, const Placement& placement) const {
    const bool coexists =
        std::all_of(outer.begin(), outer.end(), [&](const auto& other) { return may_coexist(other, placement); });
    return coexists && splits_largest(placement, outer, sizes, call_.mesh.shape());
  }

  /// Whether a move to `to` on this mesh dim changes a split of a tensor dim that an inner mesh dim splits as well, which then
  /// has to make it whole first.
  bool moves_inner_splits(const Placements& from, const Placement& to) const {
    for (size_t inner = mesh_dim_ + 1; inner < from.size(); ++inner) {
      if (moves_split(from, inner, to)) return true;
    }
    return false;
  }
  bool moves_split(const Placements& from, size_t inner, const Placement& to) const {
    return shared_dim(from[inner], from[mesh_dim_]) || shared_dim(from[inner], to);
  }

  double cost(size_t input, const Placement& to) const {
    const auto& tensor = call_.tensors[input];
    const auto& from = tensor.spec->placements();
    if (from[mesh_dim_] == to) return 0;
    constexpr double kLeavesPlan = 1e30; // more than any move, and less than none at all
    if (keeps_plan_ && is_sharded(to) && !is_replicate(from[mesh_dim_])) return kLeavesPlan;
    const auto element = static_cast<double>(c10::elementSize(tensor.dtype));
    if (moves_inner_splits(from, to)) {
      auto moved = from;
      moved[mesh_dim_] = to;
      for (auto inner = mesh_dim_ + 1; inner < from.size(); ++inner) { // a RaggedShard of the parts goes with them
        if (std::holds_alternative<RaggedShard>(from[inner]) && moves_split(from, inner, to)) moved[inner] = Replicate{};
      }
      return redistribute_price(from, moved, call_.mesh.shape(), tensor.sizes, element);
    }
    const auto size = redistribute::move_size(tensor.sizes, element, from, call_.mesh.shape(), {mesh_dim_});
    return redistribute::price(redistribute::choose_route(from[mesh_dim_], to), from[mesh_dim_], to, size, ranks());
  }

  /// Whether it is the best one so far.
  bool consider(const Signature& signature, int factor) {
    double total = 0;
    for (size_t i = 0; i < signature.inputs.size() && total < best_cost_; ++i) {
      if (!current(i)) continue;
      if (bounds_.inputs[i].hold == InputHold::kFixed && signature.inputs[i] != *current(i)) return false;
      if (!compatible(call_.tensors[i].sizes, chosen_.inputs[i], signature.inputs[i])) return false;
      total += cost(i, signature.inputs[i]);
    }
    for (size_t r = 0; r < signature.outputs.size(); ++r) {
      const auto& [fixed, tied] = bounds_.outputs[r];
      if (tied >= 0 && signature.outputs[r] != signature.inputs[tied]) return false;
      if (fixed && (*fixed)[mesh_dim_] != signature.outputs[r]) return false;
      if (!compatible(factors_.outputs[r].sizes, chosen_.outputs[r], signature.outputs[r])) return false;
    }
    if (total >= best_cost_) return false;
    best_ = signature;
    best_cost_ = total;
    best_factor_ = factor;
    return true;
  }

  const OpCall& call_;
  const Factorization& factors_;
  const Bounds& bounds_;
  const bool keeps_plan_ = is_planned(call_.mesh);
  std::vector<int64_t> splits_; ///< ranks that earlier mesh dims split each factor over
  CallPlacements chosen_;
  size_t mesh_dim_ = 0;
  Signature best_;
  double best_cost_ = 0;
  int best_factor_ = -1;
  size_t best_source_ = 0; ///< the RaggedShard that the best one stretches inputs over
};

} // namespace

std::optional<CallPlacements> propagate(const OpCall& call, const Factorization& factors, const Bounds& bounds) {
  return Search(call, factors, bounds).run();
}

std::string describe(const OpCall& call) {
  std::vector<std::string> parts;
  for (const auto& tensor : call.tensors) {
    if (!tensor.spec) continue;
    const auto dtype = absl::AsciiStrToLower(c10::toString(tensor.dtype));
    parts.push_back(fmt::format("{}[{}] {}", dtype, fmt::join(tensor.sizes, ", "), to_string(tensor.spec->placements())));
    if (parts.size() == 8 && call.tensors.size() > 8) {
      parts.emplace_back("…");
      break;
    }
  }
  return fmt::format("arguments {} on {}", fmt::join(parts, ", "), call.mesh.to_string());
}

} // namespace tessera::internal::dispatch
