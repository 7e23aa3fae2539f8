#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include <tessera/dtensor/dispatch/plan.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/sharding_math.h>

namespace tessera::dispatch {

namespace {

using rules::Factorization;
using rules::OpCall;
using rules::PartialFlow;
using rules::TensorDims;

/// One way to run the operator on one mesh dim.
struct Signature {
  absl::InlinedVector<Placement, 4> inputs, outputs;
};

class Search {
 public:
  Search(const OpCall& call, const Factorization& factors, const std::vector<bool>& fixed,
         const std::vector<const Placements*>& fixed_outputs, const std::vector<int>& tied)
      : call_(call),
        factors_(factors),
        fixed_(fixed),
        fixed_outputs_(fixed_outputs),
        tied_(tied),
        splits_(factors.factors.size(), 1) {
    chosen_.inputs.resize(factors.inputs.size());
    chosen_.outputs.resize(factors.outputs.size());
  }

  Chosen run() {
    for (mesh_dim_ = 0; mesh_dim_ < static_cast<size_t>(call_.mesh.ndim()); ++mesh_dim_) choose();
    return std::move(chosen_);
  }

 private:
  int64_t ranks() const { return call_.mesh.size(static_cast<int64_t>(mesh_dim_)); }
  const Placement* current(size_t input) const {
    const auto& spec = call_.tensors[input].spec;
    return spec ? &spec->placements()[mesh_dim_] : nullptr;
  }

  void choose() {
    best_cost_ = std::numeric_limits<double>::infinity();
    best_factor_ = -1;
    found_ = false;
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
    if (!found_) fail();
    for (size_t i = 0; i < best_.inputs.size(); ++i) chosen_.inputs[i].push_back(best_.inputs[i]);
    for (size_t r = 0; r < best_.outputs.size(); ++r) chosen_.outputs[r].push_back(best_.outputs[r]);
    if (best_factor_ >= 0) splits_[best_factor_] *= ranks();
  }

  Signature replicated() const {
    Signature signature;
    signature.inputs.resize(factors_.inputs.size());
    signature.outputs.resize(factors_.outputs.size());
    return signature;
  }

  static int dim_of(const TensorDims& tensor, int factor) {
    for (size_t d = 0; d < tensor.factors.size(); ++d) {
      if (tensor.factors[d] == factor) return static_cast<int>(d);
    }
    return -1;
  }

  bool stays_plain(size_t output) const { return output < 64 && (factors_.plain_outputs >> output & 1); }

  /// Sets the outputs without the split dims, and what is added to them, to Partial.
  bool reduce_outputs(Signature& signature, const std::vector<bool>& has, const rules::Factor& factor) const {
    const auto& reduction = factor.reduction;
    bool reduced = false;
    for (size_t r = 0; r < has.size(); ++r) {
      if (has[r] || factor.absent_is_replicate || stays_plain(r)) continue;
      if (!reduction) return false;
      signature.outputs[r] = *reduction;
      reduced = true;
    }
    for (size_t i = 0; reduced && i < signature.inputs.size(); ++i) {
      if (i < 64 && (factors_.additive >> i & 1)) signature.inputs[i] = *reduction;
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
    if (factor.even_only && factor.size % (splits_[f] * ranks()) != 0) return;
    if (factor.no_empty && leaves_empty(factor.size, splits_[f])) return;
    split(f, [](int dim) { return Shard{dim}; });
  }

  /// A factor may be split in any way by kernels that do not ask where a local tensor starts.
  void split_strided(int f, int64_t split_factor) {
    if (f == rules::kNoFactor || (factors_.asks_offsets && !factors_.merges_leading)) return;
    if (factors_.factors[f].even_only || factors_.factors[f].no_empty) return;
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
    if (partial.op != Partial::Op::kAvg || !current(input) || is_replicate(*current(input)) || is_partial(*current(input)))
      return false;
    const auto dtype = call_.tensors[input].dtype;
    return dtype == at::kHalf || !(at::isFloatingType(dtype) || at::isComplexType(dtype));
  }

  bool flow_through(const PartialFlow& flow, const Partial& partial) {
    if (!(flow.ops >> static_cast<int>(partial.op) & 1)) return false;
    auto signature = replicated();
    for (size_t k = 0; k < signature.inputs.size(); ++k) {
      const bool takes_part = flow.inputs == rules::kEveryInput || (k < 64 && (flow.inputs >> k & 1));
      if (takes_part && may_overflow(k, partial)) return false;
      if (takes_part) signature.inputs[k] = partial;
    }
    for (auto& output : signature.outputs) output = flow.output_is_replicate ? Placement(Replicate{}) : Placement(partial);
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

  /// Input `source` is a RaggedShard: every tensor with the same leading factors is split alike.
  void split_leading(size_t source, const RaggedShard& ragged) {
    if (ragged.dim > 0 ? !factors_.merges_leading : !factors_.leading_whole) return;
    const auto& dims = factors_.inputs[source].factors;
    const absl::InlinedVector<int, 6> group(dims.begin(), dims.begin() + ragged.dim + 1);
    rules::Factor last;
    for (const auto f : group) {
      if (f == rules::kNoFactor || factors_.factors[f].even_only || factors_.factors[f].no_empty) return;
      last = factors_.factors[f];
    }
    auto signature = replicated();
    for (size_t i = 0; i < factors_.inputs.size(); ++i) {
      const auto& tensor = factors_.inputs[i];
      const auto kind = leading(tensor, group);
      // What is broadcast against merged dims must not reach into them.
      const bool too_long = ragged.dim > 0 && tensor.sizes.size() + ragged.dim > factors_.inputs[source].sizes.size();
      if (kind == Leading::kMixed || (kind == Leading::kNone && too_long)) return;
      if (kind == Leading::kAll) signature.inputs[i] = ragged;
    }
    std::vector<bool> has(factors_.outputs.size());
    for (size_t r = 0; r < has.size(); ++r) {
      const auto kind = leading(factors_.outputs[r], group);
      if (kind == Leading::kMixed) return;
      has[r] = kind == Leading::kAll;
      if (has[r]) signature.outputs[r] = ragged;
    }
    if (reduce_outputs(signature, has, last)) consider(signature, -1);
  }

  void mapped() {
    Placements others;
    for (size_t m = 0; m < call_.tensors[0].spec->placements().size(); ++m) {
      if (m != mesh_dim_) others.push_back(call_.tensors[0].spec->placements()[m]);
    }
    if (is_strided(*current(0))) return;
    const auto results = factors_.map(*current(0), others, ranks());
    if (results.empty()) return;
    auto signature = replicated();
    signature.inputs[0] = *current(0);
    for (size_t r = 0; r < signature.outputs.size(); ++r) signature.outputs[r] = results.size() == 1 ? results[0] : results[r];
    consider(signature, -1);
  }

  /// The split of `placement` does not cross one that an outer mesh dim makes.
  static bool compatible(const Placements& outer, const Placement& placement) {
    for (const auto& other : outer) {
      const bool both = is_partial(other) && is_partial(placement);
      if (both && !reduce_together(std::get<Partial>(other), std::get<Partial>(placement))) return false;
      const auto* ragged = std::get_if<RaggedShard>(&placement);
      const auto* other_ragged = std::get_if<RaggedShard>(&other);
      for (int64_t d = 0; ragged && d <= ragged->dim; ++d) {
        if (shards_dim(other, d)) return false;
      }
      for (int64_t d = 0; other_ragged && d <= other_ragged->dim; ++d) {
        if (shards_dim(placement, d)) return false;
      }
    }
    return true;
  }

  double cost(size_t input, const Placement& to) const {
    const auto& tensor = call_.tensors[input];
    const auto& from = tensor.spec->placements();
    if (from[mesh_dim_] == to) return 0;
    const auto size =
        move_size(tensor.sizes, static_cast<double>(c10::elementSize(tensor.dtype)), from, call_.mesh.shape(), {mesh_dim_});
    return redistribute_cost(from[mesh_dim_], to, size, ranks());
  }

  void consider(const Signature& signature, int factor) {
    double total = 0;
    for (size_t i = 0; i < signature.inputs.size() && total < best_cost_; ++i) {
      if (!current(i)) continue;
      if (fixed_[i] && signature.inputs[i] != *current(i)) return;
      if (!compatible(chosen_.inputs[i], signature.inputs[i])) return;
      total += cost(i, signature.inputs[i]);
    }
    for (size_t r = 0; r < signature.outputs.size(); ++r) {
      if (tied_[r] >= 0 && signature.outputs[r] != signature.inputs[tied_[r]]) return;
      if (fixed_outputs_[r] && (*fixed_outputs_[r])[mesh_dim_] != signature.outputs[r]) return;
      if (!compatible(chosen_.outputs[r], signature.outputs[r])) return;
    }
    if (total >= best_cost_) return;
    best_ = signature;
    best_cost_ = total;
    best_factor_ = factor;
    found_ = true;
  }

  [[noreturn]] void fail() const {
    TORCH_CHECK(
        false, call_.name, ": the written tensor would have to change its placement on mesh dim ", mesh_dim_,
        ", which an in-place or out= operator cannot do. Redistribute it first, or use the operator that returns a new tensor; ",
        describe(call_));
  }

  const OpCall& call_;
  const Factorization& factors_;
  const std::vector<bool>& fixed_;
  const std::vector<const Placements*>& fixed_outputs_;
  const std::vector<int>& tied_;
  std::vector<int64_t> splits_; ///< ranks that earlier mesh dims split each factor over
  Chosen chosen_;
  size_t mesh_dim_ = 0;
  Signature best_;
  double best_cost_ = 0;
  int best_factor_ = -1;
  bool found_ = false;
};

} // namespace

Chosen propagate(const OpCall& call, const Factorization& factors, const std::vector<bool>& fixed,
                 const std::vector<const Placements*>& fixed_outputs, const std::vector<int>& tied) {
  return Search(call, factors, fixed, fixed_outputs, tied).run();
}

std::string describe(const OpCall& call) {
  std::vector<std::string> parts;
  for (const auto& tensor : call.tensors) {
    if (!tensor.spec) continue;
    auto dtype = std::string(c10::toString(tensor.dtype));
    absl::AsciiStrToLower(&dtype);
    parts.push_back(fmt::format("{}[{}] {}", dtype, fmt::join(tensor.sizes, ", "), to_string(tensor.spec->placements())));
    if (parts.size() == 8 && call.tensors.size() > 8) {
      parts.emplace_back("…");
      break;
    }
  }
  return fmt::format("arguments {} on {}", fmt::join(parts, ", "), call.mesh.to_string());
}

} // namespace tessera::dispatch
