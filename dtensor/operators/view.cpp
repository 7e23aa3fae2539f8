#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/algorithm/container.h>

#include <algorithm>
#include <numeric>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::rules {

namespace {

/// Fills -1 in a view's target shape.
std::vector<int64_t> complete(std::vector<int64_t> sizes, int64_t numel) {
  const auto unknown = std::find(sizes.begin(), sizes.end(), -1);
  if (unknown == sizes.end()) return sizes;
  int64_t rest = 1;
  for (auto it = sizes.begin(); it != sizes.end(); ++it) rest *= it == unknown ? 1 : *it;
  *unknown = rest == 0 ? 0 : numel / rest;
  return sizes;
}

/// Ranges of the row-major elements, one a rank, as a placement of a tensor of shape `sizes`. It splits the leading dims 0..d for
/// the smallest d at which every range is a whole number of positions.
std::optional<Placement> from_ranges(const std::vector<Extent>& ranges, const std::vector<int64_t>& sizes) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto trailing = product(sizes, dim + 1, sizes.size());
    std::vector<int64_t> extents;
    bool fits = trailing > 0;
    for (size_t r = 0; r < ranges.size() && fits; ++r) {
      fits = ranges[r].size % trailing == 0;
      extents.push_back(ranges[r].size / trailing);
    }
    if (fits) return from_extents(static_cast<int64_t>(dim), extents);
  }
  return std::nullopt;
}

/// Splits of dim 0 and ragged splits survive any reshape: they are ranges of the row-major elements.
PlacementMap map_ranges(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  return [from, to](const Placement& placement, const Placements& others, int64_t ranks) -> std::vector<Placement> {
    const auto* shard = std::get_if<Shard>(&placement);
    const bool ranges = std::holds_alternative<RaggedShard>(placement) || (shard && shard->dim == 0);
    if (!ranges || any_sharded(others) || product(from, 0, from.size()) == 0) return {};
    const auto result = from_ranges(redistribute::flat_ranges(from, placement, ranks), to);
    return result ? std::vector<Placement>{*result} : std::vector<Placement>{};
  };
}

/// Dims `in`… of the input that become dims `out`… of the output.
struct DimGroup {
  size_t in, in_end, out, out_end;
  bool merges() const { return out_end == out + 1; } ///< or stays
  bool splits() const { return in_end == in + 1; }   ///< or stays
  bool stays() const { return merges() && splits(); }
};

/// A split of an inner dim that is merged with those before it, and back. On each rank these lie one after another, so that a
/// StridedShard of the merged dim takes the same elements: the heads of attention, which are merged with the batch for a product.
class MapInnerSplits {
 public:
  MapInnerSplits(const OpCall& call, std::vector<int64_t> to, std::vector<DimGroup> groups)
      : placements_(call.tensors[0].spec->placements()),
        mesh_shape_(call.mesh.shape()),
        from_(call.tensors[0].sizes),
        to_(std::move(to)),
        groups_(std::move(groups)) {}

  std::optional<Placement> operator()(const Placement& placement, const Placements& others, int64_t ranks) const {
    const auto outer = outer_splits(placement, others);
    for (const auto& group : groups_) {
      if (group.merges() && std::holds_alternative<Shard>(placement)) {
        if (auto result = merged(std::get<Shard>(placement), group, outer, ranks)) return result;
      } else if (group.splits() && is_strided(placement)) {
        if (auto result = unmerged(std::get<StridedShard>(placement), group, outer, ranks)) return result;
      }
    }
    return std::nullopt;
  }

 private:
  /// How often mesh dims before the one with `placement` split each dim evenly; 0 for a dim that they split otherwise. A
  /// StridedShard like `placement` leaves the chunks that it is a part of.
  std::vector<int64_t> outer_splits(const Placement& placement, const Placements& others) const {
    std::vector<int64_t> splits(from_.size(), 1);
    for (size_t m = 0; m < others.size() && (placements_[m] == others[m] || placements_[m] != placement); ++m) {
      for (size_t d = 0; d < from_.size(); ++d) {
        if (!shards_dim(placements_[m], static_cast<int64_t>(d)) || (is_strided(placement) && placements_[m] == placement))
          continue;
        const bool even =
            splits[d] > 0 && std::holds_alternative<Shard>(placements_[m]) && from_[d] % (splits[d] * mesh_shape_[m]) == 0;
        splits[d] = even ? splits[d] * mesh_shape_[m] : 0;
      }
    }
    return splits;
  }

  std::optional<Placement> merged(const Shard& shard, const DimGroup& group, const std::vector<int64_t>& outer,
                                  int64_t ranks) const {
    const auto dim = static_cast<size_t>(shard.dim);
    if (dim <= group.in || dim >= group.in_end) return std::nullopt;
    int64_t chunks = 1;
    for (size_t d = group.in; d < dim; ++d) {
      if (outer[d] == 0 || (outer[d] > 1 && d > group.in)) return std::nullopt;
      chunks *= from_[d] / outer[d];
    }
    const bool even = outer[dim] > 0 && from_[dim] % (outer[dim] * ranks) == 0;
    if (!even && dim + 1 < group.in_end) return std::nullopt;
    return StridedShard{static_cast<int64_t>(group.out), chunks};
  }

  std::optional<Placement> unmerged(const StridedShard& strided, const DimGroup& group, const std::vector<int64_t>& outer,
                                    int64_t ranks) const {
    const auto splits = outer[group.in];
    if (strided.dim != static_cast<int64_t>(group.in) || splits == 0 || to_[group.out] % splits != 0) return std::nullopt;
    int64_t chunks = 1;
    for (size_t d = group.out; d + 1 < group.out_end; ++d) {
      chunks *= to_[d];
      if (chunks != strided.split_factor * splits || to_[d + 1] == 1) continue;
      const bool even = to_[d + 1] % (ranks * absl::c_count(placements_, Placement(strided))) == 0;
      return d + 2 == group.out_end || even ? std::optional<Placement>(Shard{static_cast<int64_t>(d + 1)}) : std::nullopt;
    }
    return std::nullopt;
  }

  Placements placements_;
  std::vector<int64_t> mesh_shape_, from_, to_;
  std::vector<DimGroup> groups_;
};

/// An even split cuts the row-major elements into blocks, and each of them over the ranks; another shape may say the same where
/// several dims become several others: [t, b, h * d] Shard(2), of heads, is [t, b * h, d] StridedShard(1, b).
std::optional<Placement> map_blocks(const Placement& placement, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
                                    int64_t ranks) {
  const auto* shard = std::get_if<Shard>(&placement);
  const auto* strided = std::get_if<StridedShard>(&placement);
  if (!shard && !strided) return std::nullopt;
  const auto dim = shard ? shard->dim : strided->dim, factor = shard ? 1 : strided->split_factor;
  if (product(from, 0, from.size()) == 0 || from[dim] % (factor * ranks) != 0) return std::nullopt;
  const auto blocks = product(from, 0, dim) * factor;
  for (auto d = static_cast<int64_t>(to.size()) - 1; d >= 0; --d) {
    const auto outer = product(to, 0, d);
    if (outer == 0 || blocks % outer != 0 || to[d] % (blocks / outer * ranks) != 0) continue;
    return blocks == outer ? Placement(Shard{d}) : Placement(StridedShard{d, blocks / outer});
  }
  return std::nullopt;
}

/// Pairs the dims of two shapes of the same numel, which is not 0: those that stay, and those that are split or merged.
std::vector<DimGroup> pair_dims(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  std::vector<DimGroup> groups;
  size_t i = 0, j = 0;
  while (i < from.size() || j < to.size()) {
    while (i < from.size() && from[i] == 1 && !(j < to.size() && to[j] == 1)) ++i;
    while (j < to.size() && to[j] == 1 && !(i < from.size() && from[i] == 1)) ++j;
    if (i >= from.size() || j >= to.size()) break;
    const size_t first_in = i, first_out = j;
    int64_t in = from[i++], out = to[j++];
    while (in != out) {
      if (in < out)
        in *= from[i++];
      else
        out *= to[j++];
    }
    groups.push_back({first_in, i, first_out, j});
  }
  return groups;
}

/// Dims that stay share a factor. Where dims are split or merged, the first ones share a factor that the ranks must divide.
Factorization reshape_factors(const OpCall& call, const std::vector<int64_t>& to) {
  const auto& from = call.tensors[0].sizes;
  Factorization factors;
  auto input = whole_dims(from), output = whole_dims(to);
  const bool empty = product(from, 0, from.size()) == 0;
  auto groups = empty ? std::vector<DimGroup>() : pair_dims(from, to);
  for (const auto& group : groups) {
    const int factor = factors.add_factor(std::gcd(from[group.in], to[group.out]));
    if (!group.stays()) factors.factors[factor].limit = SplitLimit::kEven;
    input.factors[group.in] = output.factors[group.out] = factor;
  }
  if (empty && from == to) {
    for (size_t d = 0; d < from.size(); ++d) input.factors[d] = output.factors[d] = factors.add_factor(from[d]);
  }
  factors.inputs.push_back(std::move(input));
  factors.add_output(std::move(output), kAllOps);
  factors.map = [from, to, ranges = map_ranges(from, to), inner = MapInnerSplits(call, to, std::move(groups))](
                    const Placement& placement, const Placements& others, int64_t ranks_of_dim) {
    auto result = ranges(placement, others, ranks_of_dim);
    auto mapped = result.empty() ? inner(placement, others, ranks_of_dim) : std::nullopt;
    if (result.empty() && !mapped && !any_sharded(others)) mapped = map_blocks(placement, from, to, ranks_of_dim);
    if (mapped) result.push_back(*mapped);
    return result;
  };
  factors.ragged = RaggedUse::kNone; // `map` serves RaggedShard
  return factors;
}

Factorization view(const OpCall& call) {
  const auto& from = call.tensors[0].sizes;
  const auto to = complete(call.integers("size"), product(from, 0, from.size()));
  TORCH_CHECK(product(from, 0, from.size()) == product(to, 0, to.size()), call.name, ": shape ", c10::IntArrayRef(to),
              " is invalid for a tensor of shape ", c10::IntArrayRef(from));
  return reshape_factors(call, to);
}

Factorization unsqueeze(const OpCall& call) {
  auto to = call.tensors[0].sizes;
  const auto dim = call.dim("dim", static_cast<int64_t>(to.size()) + 1);
  to.insert(to.begin() + dim, 1);
  return reshape_factors(call, to);
}

Factorization squeeze(const OpCall& call) {
  const auto& from = call.tensors[0].sizes;
  const bool all = !call.find("dim");
  const auto named = call.named_dims("dim");
  std::vector<int64_t> to;
  for (size_t d = 0; d < from.size(); ++d) {
    if (from[d] != 1 || !(all || named[d])) to.push_back(from[d]);
  }
  return reshape_factors(call, to);
}

/// Whether a part with these strides is viewed in the output's shape. A program's own parts may have gaps, of which the strides
/// of the whole say nothing. Dims that views merge are whole but for the first: the sizes of the whole give the same answer on
/// every rank, where a part of one row would fit any view.
bool has_view(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& to) {
  const auto& sizes = spec.sizes();
  const auto merged = static_cast<int64_t>(sizes.size()) - local.dim(); // leading dims, less one
  at::DimVector from(sizes.begin() + merged, sizes.end());
  if (merged > 0) from[0] = product(sizes, 0, merged + 1);
  return at::detail::computeStride(from, local.strides(), at::DimVector(to)).has_value();
}

/// Whether the parts of all ranks tell alike that they have gaps: of several elements in each dim of `sizes` that `placements`
/// split, or of as many on every rank.
bool parts_tell_gaps(const Placements& placements, const std::vector<int64_t>& sizes, const DeviceMesh& mesh) {
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    int64_t ranks = 1;
    for (size_t m = 0; m < placements.size(); ++m) {
      if (placements[m] == Placement(Shard{d})) ranks *= mesh.size(static_cast<int64_t>(m));
    }
    const auto most = chunk_extent(sizes[d], ranks, 0).size, least = chunk_extent(sizes[d], ranks, ranks - 1).size;
    if (least < 2 && least < most) return false;
  }
  return true;
}

/// The same where an inner dim of those that are merged is split: they must follow one another in the part, also where that has
/// one row of them.
bool has_view_of_inner_splits(const at::Tensor& local, const Spec& spec, const OutputPlan& output) {
  const auto& from = spec.sizes();
  if (!parts_tell_gaps(spec.placements(), from, spec.mesh())) return false;
  if (!parts_tell_gaps(output.placements, output.sizes, spec.mesh())) return false;
  for (const auto& group : pair_dims(from, output.sizes)) {
    int64_t next = -1; // the dim behind, of those of several elements
    for (auto d = static_cast<int64_t>(group.in_end) - 1; d >= static_cast<int64_t>(group.in); --d) {
      if (from[d] == 1) continue;
      if (next >= 0 && local.stride(d) != local.size(next) * local.stride(next)) return false;
      next = d;
    }
  }
  return true;
}

bool can_view(const at::Tensor& local, const Spec& spec, const OutputPlan& output) {
  const bool strided = absl::c_any_of(spec.placements(), is_strided) || absl::c_any_of(output.placements, is_strided);
  const bool inner_splits = strided && local.dim() == spec.dim();
  return inner_splits ? has_view_of_inner_splits(local, spec, output) : has_view(local, spec, output.sizes);
}

/// Views the local tensor in the output's local shape.
void view_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  const auto& output = call.outputs[0];
  call.copies_view = !can_view(local, *call.inputs[0], output);
  call.finish(call.copies_view ? local.reshape(output.local_sizes) : local.view(output.local_sizes));
}

void reshape_local(const LocalCall& call) { call.finish(call.arg(0).toTensor().reshape(call.outputs[0].local_sizes)); }

/// Reshapes into memory of its own.
void reshape_copy_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  const auto result = local.reshape(call.outputs[0].local_sizes);
  call.finish(result.is_alias_of(local) ? result.clone() : result);
}

/// `order[d]`: the input dim that becomes output dim d.
Factorization permuted(const OpCall& call, const std::vector<int64_t>& order) {
  auto factors = first_input_factors(call);
  TensorDims output;
  for (const auto d : order) output.add(factors.inputs[0].factors[d], call.tensors[0].sizes[d]);
  factors.add_output(std::move(output), kAllOps);
  return factors;
}

Factorization permute(const OpCall& call) {
  auto order = call.integers("dims");
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  TORCH_CHECK(static_cast<int64_t>(order.size()) == ndim, call.name, ": ", order.size(), " dims given for a tensor of ", ndim);
  for (auto& d : order) d = call.wrap_dim(d, ndim);
  return permuted(call, order);
}

Factorization transpose(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  std::vector<int64_t> order(ndim);
  std::iota(order.begin(), order.end(), 0);
  if (ndim > 0) std::swap(order[call.dim("dim0", ndim)], order[call.dim("dim1", ndim, 1)]);
  return permuted(call, order);
}

Factorization t(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  TORCH_CHECK(ndim <= 2, call.name, " needs at most 2 dims, not ", ndim);
  return permuted(call, ndim == 2 ? std::vector<int64_t>{1, 0} : std::vector<int64_t>(ndim, 0));
}

Factorization expand(const OpCall& call) {
  auto to = call.integers("size");
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  TORCH_CHECK(to.size() >= input.sizes.size(), call.name, ": ", to.size(), " sizes given for a tensor of ", input.sizes.size(),
              " dims");
  const auto shift = to.size() - input.sizes.size();
  TensorDims output;
  for (size_t d = 0; d < to.size(); ++d) {
    const bool old = d >= shift;
    if (old && to[d] == -1) to[d] = input.sizes[d - shift];
    const bool kept = old && to[d] == input.sizes[d - shift];
    TORCH_CHECK(kept || !old || input.sizes[d - shift] == 1, call.name, ": size ", old ? input.sizes[d - shift] : 1, " of dim ",
                d - shift, " cannot be expanded to ", to[d]);
    output.add(kept ? input.factors[d - shift] : kNoFactor, to[d]);
    if (old && !kept) input.factors[d - shift] = kNoFactor;
  }
  if (shift > 0) factors.ragged = RaggedUse::kNone;
  factors.add_output(std::move(output), kAllOps);
  return factors;
}

void expand_local(const LocalCall& call) { call.finish(call.arg(0).toTensor().expand(call.outputs[0].local_sizes)); }

Factorization diagonal(const OpCall& call) {
  const auto& sizes = call.tensors[0].sizes;
  const auto ndim = static_cast<int64_t>(sizes.size());
  auto first = call.dim("dim1", ndim, 0), second = call.dim("dim2", ndim, 1);
  TORCH_CHECK(first != second && ndim >= 2, call.name, ": dims ", first, " and ", second, " of a tensor of ", ndim);
  const auto offset = call.integer("offset", 0);
  const auto rows = sizes[first] + std::min<int64_t>(offset, 0), columns = sizes[second] - std::max<int64_t>(offset, 0);
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  input.factors[first] = input.factors[second] = kNoFactor;
  TensorDims output;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d == first || d == second) continue;
    output.add(input.factors[d], sizes[d]);
  }
  output.add(kNoFactor, std::max<int64_t>(0, std::min(rows, columns)));
  factors.add_output(std::move(output), kAllOps);
  return factors;
}

/// What is lazy on a plain tensor is done at once: a collective sends what lies in memory.
void physical(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  call.finish(call.op.operator_name().name == "aten::_conj" ? local.conj_physical() : local.neg());
}

/// Shares the meta with its source, so that both stay the same DTensor.
void alias(const c10::OperatorHandle&, std::vector<c10::IValue>* stack) {
  auto result = alias_dtensor(stack->back().toTensor());
  stack->back() = std::move(result);
}

/// squeeze_ and the like: the tensor becomes the view that the operator without the underscore gives of it.
void reshape_in_place(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto& name = op.operator_name();
  const auto self = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  const auto view = name.name.substr(0, name.name.size() - 1);
  const auto overload = view == "aten::transpose" ? "int" : name.overload_name;
  c10::Dispatcher::singleton().findSchemaOrThrow(view.c_str(), overload.c_str()).callBoxed(*stack);
  auto* meta = dtensor_meta(stack->back().toTensor());
  TORCH_CHECK(!meta->copied_at_version, name,
              ": the data would have to move between ranks, away from the tensors that share it; use ", view, ". The spec is ",
              dtensor_meta(self)->spec->to_string());
  become_dtensor(self, c10::intrusive_ptr<DTensorMeta>::reclaim_copy(meta));
  stack->back() = self;
}

} // namespace

void register_views(Registry& registry) {
  registry.add("squeeze_ unsqueeze_ transpose_ t_", Handler(reshape_in_place));
  registry.add("detach alias lift lift_fresh", Handler(alias));
  registry.add("view. _reshape_alias", OnLocals(view).run(view_local, KernelKind::kAnyOffsets));
  registry.add("_unsafe_view", OnLocals(view).run(reshape_local, KernelKind::kAnyOffsets));
  registry.add("view_copy. _reshape_copy reshape_copy", OnLocals(view).run(reshape_copy_local, KernelKind::kAnyOffsets));
  registry.add("unsqueeze", OnLocals(unsqueeze).run(view_local, KernelKind::kAnyOffsets));
  registry.add("squeeze", OnLocals(squeeze).run(view_local, KernelKind::kAnyOffsets));
  registry.add("permute", OnLocals(permute));
  registry.add("transpose.int", OnLocals(transpose));
  registry.add("t", OnLocals(t));
  registry.add("expand", OnLocals(expand).run(expand_local, KernelKind::kAnyOffsets));
  registry.add("view_as_complex", OnLocals(by_pattern("...*->...")));
  registry.add("view_as_real", OnLocals(by_pattern("...->...*")));
  registry.add("_conj _neg_view", OnLocals(pointwise_factors).run(physical, KernelKind::kCopiesView));
  registry.add("diagonal", OnLocals(diagonal));
}

} // namespace tessera::internal::rules
