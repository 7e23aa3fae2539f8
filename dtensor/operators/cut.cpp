#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::rules {

namespace {

/// Positions `start`, `start + step`, … before `end` of a dim; `drop`: one position, and the dim goes.
struct Cut {
  int64_t start, end, step = 1;
  bool drop = false;

  /// How many of them lie before `at`.
  int64_t before(int64_t at) const { return at <= start ? 0 : (std::min(at, end) - start + step - 1) / step; }
  int64_t count() const { return before(end); }
};

/// Positions of a RaggedShard that one row of dim 0 takes.
int64_t row_positions(const RaggedShard& ragged, const std::vector<int64_t>& sizes) { return product(sizes, 1, ragged.dim + 1); }

/// How many of a rank's positions a cut keeps.
int64_t kept_positions(const Cut& cut, const Extent& part, int64_t row) {
  if (row == 1) return cut.before(part.offset + part.size) - cut.before(part.offset);
  const auto begin = std::max(part.offset, cut.start * row), end = std::min(part.offset + part.size, cut.end * row);
  return std::max<int64_t>(0, end - begin);
}

/// One entry of the last dim that a RaggedShard splits, as a cut of the leading dims taken as one.
Cut column_cut(const Cut& cut, const RaggedShard& ragged, const std::vector<int64_t>& sizes) {
  return {cut.start, product(sizes, 0, ragged.dim + 1), std::max<int64_t>(sizes[ragged.dim], 1)};
}

/// Whether a cut takes whole chunks of a StridedShard of a dim of `size`.
bool takes_chunks(const Cut& cut, const StridedShard& strided, int64_t size) {
  const auto chunk = size / strided.split_factor;
  return !cut.drop && cut.step == 1 && cut.count() > 0 && cut.start % chunk == 0 && cut.count() % chunk == 0;
}

/// The placements of the outputs when dim `dim`, which is split, is cut; none where no placement says it.
///
/// A cut of dim 0: each rank keeps those of its rows that the cut takes. One entry of another dim: its owner alone has it, under
/// a RaggedShard in which all other ranks have nothing. One element of a vector: its owner has the value and the other ranks the
/// lowest value of the dtype (`local_cut`), so the result is a Partial(max). Chunks of a StridedShard: each rank has its part of
/// them, as of the q, k and v of a packed projection.
struct CutParts {
  std::vector<int64_t> sizes;
  int64_t dim;
  std::vector<Cut> cuts;
  bool ordered; ///< there are kernels for the largest of values of this dtype

  std::vector<Placement> operator()(const Placement& placement, const Placements& others, int64_t ranks) const {
    const bool drop = cuts[0].drop;
    if (!shards_dim(placement, dim)) return {};
    if (is_strided(placement)) return any_sharded(others) ? std::vector<Placement>{} : of_chunks(placement, ranks);
    if (drop && sizes.size() == 1) {
      return ordered && cuts.size() == 1 ? std::vector<Placement>{Partial{Partial::Op::kMax}} : std::vector<Placement>{};
    }
    if (any_sharded(others)) return {};
    std::vector<Placement> result;
    for (const auto& cut : cuts) {
      const auto* ragged = std::get_if<RaggedShard>(&placement);
      const auto part = ragged ? of_ragged(*ragged, cut, ranks) : dim == 0 ? of_rows(cut, ranks) : of_owner(cut, ranks);
      if (!part) return {};
      result.push_back(*part);
    }
    return result;
  }

 private:
  std::vector<Placement> of_chunks(const Placement& placement, int64_t ranks) const {
    const auto& strided = std::get<StridedShard>(placement);
    if (sizes[dim] == 0 || sizes[dim] % (strided.split_factor * ranks) != 0) return {};
    std::vector<Placement> result;
    for (const auto& cut : cuts) {
      if (!takes_chunks(cut, strided, sizes[dim])) return {};
      const auto chunks = cut.count() / (sizes[dim] / strided.split_factor);
      result.push_back(chunks == 1 ? Placement(Shard{dim}) : Placement(StridedShard{dim, chunks}));
    }
    return result;
  }

  std::optional<Placement> of_rows(const Cut& cut, int64_t ranks) const {
    std::vector<int64_t> extents;
    for (int64_t r = 0; r < ranks; ++r) {
      extents.push_back(kept_positions(cut, chunk_extent(sizes[0], ranks, r), 1) * (cut.drop ? sizes[1] : 1));
    }
    return from_extents(0, extents);
  }

  std::optional<Placement> of_owner(const Cut& cut, int64_t ranks) const {
    if (!cut.drop) return std::nullopt;
    std::vector<int64_t> extents;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto part = chunk_extent(sizes[dim], ranks, r);
      extents.push_back(part.offset <= cut.start && cut.start < part.offset + part.size ? sizes[0] : 0);
    }
    return from_extents(0, extents);
  }

  std::optional<Placement> of_ragged(const RaggedShard& ragged, const Cut& cut, int64_t ranks) const {
    const bool column = dim > 0;
    if (column ? !cut.drop || dim != ragged.dim : ragged.dim > 0 && cut.step != 1) return std::nullopt;
    const auto positions = column ? column_cut(cut, ragged, sizes) : cut;
    const auto row = column ? 1 : row_positions(ragged, sizes);
    std::vector<int64_t> extents;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto kept = kept_positions(positions, ragged_extent(ragged, r), row);
      extents.push_back(cut.drop && ragged.dim == 0 ? kept * sizes[1] : kept);
    }
    return from_extents(std::max<int64_t>(ragged.dim - (cut.drop ? 1 : 0), 0), extents);
  }
};

/// Dim `dim` is cut, into one output a cut: it must be whole, or dim 0.
Factorization cut_dim(const OpCall& call, int64_t dim, const std::vector<Cut>& cuts) {
  auto factors = first_input_factors(call);
  factors.inputs[0].factors[dim] = kNoFactor;
  for (const auto& cut : cuts) {
    auto output = factors.inputs[0];
    if (cut.drop) {
      output.factors.erase(output.factors.begin() + dim);
      output.sizes.erase(output.sizes.begin() + dim);
    } else {
      output.sizes[dim] = cut.count();
    }
    factors.outputs.push_back(std::move(output));
  }
  if (dim == 0) factors.ragged = RaggedUse::kNone;
  const auto dtype = call.tensors[0].dtype;
  const bool ordered = !at::isComplexType(dtype) && !at::isBarebonesUnsignedType(dtype);
  if (!cuts.empty()) factors.map = CutParts{call.tensors[0].sizes, dim, cuts, ordered};
  factors.partial.push_back(flow({0}, kAllOps));
  return factors;
}

/// The local part of a cut of dim `dim`.
at::Tensor local_cut(const LocalCall& call, int64_t dim, const Cut& cut, size_t output) {
  const auto& local = call.arg(0).toTensor();
  const auto& spec = *call.inputs[0];
  const auto& sizes = call.outputs[output].local_sizes;
  if (!cut.drop && cut.count() == spec.sizes()[dim]) return local.view(local.sizes()); // of all, however it is split
  if (const auto* ragged = spec.ragged(); ragged && ragged->dim > 0) {
    if (dim > 0) {
      const auto column = column_cut(cut, *ragged, spec.sizes());
      const auto before = column.before(spec.local_offsets()[0]);
      return local.slice(0, column.start + before * column.step - spec.local_offsets()[0], local.size(0), column.step);
    }
    const auto row = row_positions(*ragged, spec.sizes()), offset = spec.local_offsets()[0];
    const auto count = kept_positions(cut, {offset, local.size(0)}, row);
    return local.narrow(0, count > 0 ? std::max<int64_t>(cut.start * row - offset, 0) : 0, count);
  }
  for (const auto& placement : spec.placements()) {
    if (!is_strided(placement) || !shards_dim(placement, dim)) continue;
    const auto ranks = spec.sizes()[dim] / local.size(dim);
    return local.narrow(dim, cut.start / ranks, cut.count() / ranks);
  }
  const bool split = local.size(dim) != spec.sizes()[dim];
  const auto offset = split ? std::min(spec.local_offsets()[dim], spec.sizes()[dim]) : 0;
  const auto first = cut.start + cut.before(offset) * cut.step - offset;
  const auto count = cut.before(offset + local.size(dim)) - cut.before(offset);
  if (!cut.drop)
    return count > 0 ? local.slice(dim, first, first + (count - 1) * cut.step + 1, cut.step) : local.narrow(dim, 0, 0);
  if (count > 0) return local.select(dim, first);
  if (sizes.empty()) return at::full({}, redistribute::neutral_value(Partial::Op::kMax, local.scalar_type()), local.options());
  return local.as_strided(sizes, contiguous_strides(sizes));
}

struct Cuts {
  int64_t dim;
  std::vector<Cut> cuts;
};

int64_t wrap(int64_t index, int64_t size) { return index < 0 ? index + size : index; }

/// What a call of the operator `op` on a tensor of `sizes` cuts.
template <typename Call>
Cuts read_cuts(const Call& call, const std::string& op, const std::vector<int64_t>& sizes) {
  TORCH_CHECK_INDEX(!sizes.empty(), op, " needs a tensor with dims");
  const auto integer = [&](std::string_view name) -> std::optional<int64_t> {
    const c10::IValue* found = call.find(name);
    return found && found->isInt() ? std::optional(found->toInt()) : std::nullopt;
  };
  const auto ndim = static_cast<int64_t>(sizes.size());
  const auto dim = wrap(integer("dim").value_or(0), ndim);
  TORCH_CHECK_INDEX(dim >= 0 && dim < ndim, op, ": dimension ", integer("dim").value_or(0), " is out of range for a tensor of ",
                    ndim, " dims");
  const auto size = sizes[dim];
  Cuts result{dim, {}};
  if (op == "aten::slice") {
    const auto first = std::clamp<int64_t>(wrap(integer("start").value_or(0), size), 0, size);
    const auto last = std::clamp<int64_t>(wrap(integer("end").value_or(size), size), first, size);
    const auto step = integer("step").value_or(1);
    TORCH_CHECK_VALUE(step > 0, op, ": the step must be positive, not ", step);
    result.cuts.push_back({first, last, step});
  } else if (op == "aten::select") {
    const auto index = wrap(*integer("index"), size);
    TORCH_CHECK_INDEX(index >= 0 && index < size, "select: index ", *integer("index"), " is out of range for dim ", dim,
                      " of size ", size);
    result.cuts.push_back({index, index + 1, 1, true});
  } else if (op == "aten::unbind") {
    for (int64_t i = 0; i < size; ++i) result.cuts.push_back({i, i + 1, 1, true});
  } else if (const c10::IValue* lengths = call.find("split_sizes")) {
    int64_t at = 0;
    for (const auto length : lengths->toIntVector()) {
      result.cuts.push_back({at, at + length});
      at += length;
    }
    TORCH_CHECK(at == size, "split_with_sizes: the sizes add up to ", at, ", not to ", size);
  } else {
    const auto part = *integer("split_size");
    TORCH_CHECK(part > 0 || (part == 0 && size == 0), "split: split size ", part, " for a dim of size ", size);
    for (int64_t at = 0; at < size; at += part) result.cuts.push_back({at, std::min(at + part, size)});
    if (result.cuts.empty()) result.cuts.push_back({0, 0});
  }
  return result;
}

Factorization cut(const OpCall& call) {
  const auto& sizes = call.tensors[0].sizes;
  const auto parts = read_cuts(call, call.schema.name(), sizes);
  const bool whole = call.schema.name() == "aten::slice" && parts.cuts[0].count() == sizes[parts.dim];
  if (!whole) return cut_dim(call, parts.dim, parts.cuts);
  auto factors = first_input_factors(call);
  factors.add_output(factors.inputs[0], kAllOps);
  return factors;
}

Cuts local_cuts(const LocalCall& call) { return read_cuts(call, call.op.schema().name(), call.inputs[0]->sizes()); }

void cut_one_local(const LocalCall& call) {
  const auto parts = local_cuts(call);
  call.finish(local_cut(call, parts.dim, parts.cuts[0], 0));
}

void cut_list_local(const LocalCall& call) {
  const auto parts = local_cuts(call);
  c10::List<at::Tensor> list;
  for (size_t i = 0; i < parts.cuts.size(); ++i) list.push_back(local_cut(call, parts.dim, parts.cuts[i], i));
  call.finish(std::move(list));
}

} // namespace

void register_cuts(Registry& registry) {
  registry.add("slice.Tensor select.int", OnLocals(cut).run(cut_one_local, KernelKind::kAnyOffsets));
  registry.add("unbind.int split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes",
               OnLocals(cut).run(cut_list_local, KernelKind::kAnyOffsets));
}

} // namespace tessera::internal::rules
