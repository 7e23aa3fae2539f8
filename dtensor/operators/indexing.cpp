#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::internal::rules {

namespace {

/// A mask of the dims from `first` on.
void check_mask(const at::Tensor& mask, const std::vector<int64_t>& sizes, size_t first) {
  for (size_t d = 0; d < static_cast<size_t>(mask.dim()) && first + d < sizes.size(); ++d) {
    TORCH_CHECK_INDEX(mask.size(static_cast<int64_t>(d)) == sizes[first + d], "The shape of the mask ", mask.sizes(),
                      " at index ", d, " does not match the shape of the indexed tensor ", c10::IntArrayRef(sizes), " at index ",
                      first + d);
  }
}

/// One index tensor a dim of `self`, undefined for a dim that is taken whole; masks become positions.
std::vector<at::Tensor> indices_by_dim(const c10::IValue& indices, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> result;
  for (const auto& value : indices.toListRef()) {
    const auto index = value.isTensor() ? value.toTensor() : at::Tensor();
    const bool mask = index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    if (!mask) {
      result.push_back(index);
      continue;
    }
    check_mask(index, sizes, result.size());
    for (const auto& positions : index.nonzero().unbind(1)) result.push_back(positions);
  }
  TORCH_CHECK_INDEX(result.size() <= sizes.size(), "too many indices for tensor of dimension ", sizes.size(), " (got ",
                    result.size(), ")");
  result.resize(sizes.size());
  return result;
}

/// What advanced indexing addresses: the shape of the result, and each dim's position in `self`, broadcastable to it.
struct Targets {
  std::vector<int64_t> sizes;
  std::vector<at::Tensor> positions;
};

std::vector<int64_t> broadcast_shape(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> result;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) result = at::infer_size(result, tensor.sizes());
  }
  return result;
}

/// A view of `tensor` with `before` and `after` dims of size 1 around its own.
at::Tensor with_ones(const at::Tensor& tensor, size_t before, size_t after) {
  std::vector<int64_t> sizes(before, 1);
  sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  sizes.insert(sizes.end(), after, 1);
  return tensor.reshape(sizes);
}

/// The dim at which the result has the indices' own dims: that of the first where the indices stand together, else 0.
template <typename Index, typename Defined>
size_t place_of_block(const std::vector<Index>& indices, const Defined& defined) {
  const auto first = std::find_if(indices.begin(), indices.end(), defined);
  const auto end = std::find_if(indices.rbegin(), std::make_reverse_iterator(first), defined).base();
  return std::all_of(first, end, defined) ? static_cast<size_t>(first - indices.begin()) : 0;
}

Targets targets_of(const std::vector<at::Tensor>& indices, const std::vector<int64_t>& sizes, const at::Tensor& like) {
  const auto defined = [](const at::Tensor& tensor) { return tensor.defined(); };
  const auto place = place_of_block(indices, defined);
  const auto block = broadcast_shape(indices);
  Targets targets;
  const auto ndim = block.size() + sizes.size() - static_cast<size_t>(std::count_if(indices.begin(), indices.end(), defined));
  targets.sizes.assign(ndim, 1);
  std::copy(block.begin(), block.end(), targets.sizes.begin() + static_cast<int64_t>(place));
  size_t at = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (at == place) at += block.size();
    if (indices[d].defined()) {
      const auto index = indices[d].to(at::kLong);
      const auto wrapped = at::where(index.lt(0), index.add(sizes[d]), index);
      TORCH_CHECK_INDEX(wrapped.numel() == 0 || (wrapped.min().item<int64_t>() >= 0 && wrapped.max().item<int64_t>() < sizes[d]),
                        "an index is out of range for dim ", d, " of size ", sizes[d]);
      targets.positions.push_back(
          with_ones(wrapped, place + block.size() - static_cast<size_t>(wrapped.dim()), ndim - place - block.size()));
    } else {
      targets.sizes[at] = sizes[d];
      targets.positions.push_back(with_ones(at::arange(sizes[d], like.options().dtype(at::kLong)), at, ndim - at - 1));
      ++at;
    }
  }
  return targets;
}

/// The leading dims that a RaggedShard takes as one.
void merge_leading(Targets& targets, const Spec& spec) {
  const auto* ragged = spec.ragged();
  if (!ragged || ragged->dim == 0) return;
  auto merged = targets.positions[0];
  for (int64_t d = 1; d <= ragged->dim; ++d) merged = merged.mul(spec.sizes()[d]).add(targets.positions[d]);
  targets.positions.erase(targets.positions.begin(), targets.positions.begin() + ragged->dim);
  targets.positions[0] = merged;
}

/// index_put on the part of `self` that this rank holds: the values whose position lies in it.
void put_part(const at::Tensor& local, const Spec& spec, const c10::IValue& indices, const at::Tensor& values, bool accumulate) {
  auto targets = targets_of(indices_by_dim(indices, spec.sizes()), spec.sizes(), local);
  const auto flat = values.expand(targets.sizes).reshape(-1);
  merge_leading(targets, spec);
  auto mine = at::ones({}, local.options().dtype(at::kBool));
  for (size_t d = 0; d < targets.positions.size(); ++d) {
    auto& position = targets.positions[d];
    position = position.sub(spec.local_offsets()[d]);
    mine = mine.logical_and(position.ge(0)).logical_and(position.lt(local.size(static_cast<int64_t>(d))));
  }
  const auto kept = mine.expand(targets.sizes).reshape(-1).nonzero().squeeze(1);
  c10::List<std::optional<at::Tensor>> local_indices;
  for (const auto& position : targets.positions) {
    local_indices.push_back(position.expand(targets.sizes).reshape(-1).index_select(0, kept));
  }
  local.index_put_(local_indices, flat.index_select(0, kept), accumulate);
}

void index_put_local(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  const bool takes_whole_values =
      std::all_of(call.inputs.begin() + 1, call.inputs.end(), [](const auto& input) { return !input || input->is_replicated(); });
  if (!takes_whole_values || !any_sharded(spec.placements())) return call.op.callBoxed(*call.stack);
  const bool in_place = call.op.schema().is_mutable();
  const auto self = call.arg(0).toTensor();
  const auto result = in_place ? self : self.clone();
  put_part(result, spec, call.arg(1), call.arg(2).toTensor(), call.arg(3).toBool());
  call.finish(result);
}

/// Factors of dims that several tensors of equal size share; `whole` is not split.
TensorDims equal_dims(const TensorDims& first, const std::vector<int64_t>& sizes, int64_t whole) {
  TensorDims dims{{}, sizes};
  for (size_t d = 0; d < sizes.size(); ++d) {
    const bool same = d < first.sizes.size() && first.sizes[d] == sizes[d] && static_cast<int64_t>(d) != whole;
    dims.factors.push_back(same ? first.factors[d] : kNoFactor);
  }
  return dims;
}

/// Input 0 with a factor a dim, but `dim`, that all others share with it as far as their sizes are equal; a dim that one of them
/// has in another size is whole.
Factorization along(const OpCall& call, int64_t dim) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs[0];
  if (dim < static_cast<int64_t>(self.factors.size())) self.factors[dim] = kNoFactor;
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    const auto& sizes = call.tensors[i].sizes;
    for (size_t d = 0; d < self.sizes.size() && sizes.size() == self.sizes.size(); ++d) {
      if (sizes[d] != self.sizes[d]) self.factors[d] = kNoFactor;
    }
  }
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    const auto& sizes = call.tensors[i].sizes;
    if (sizes.size() == self.sizes.size()) factors.inputs[i] = equal_dims(self, sizes, dim);
  }
  return factors;
}

int64_t dim_argument(const OpCall& call) { return call.dim("dim", static_cast<int64_t>(call.tensors[0].sizes.size()), 0); }

/// self, index → what index names of self; along `dim` the index may be split.
Factorization gather(const OpCall& call) {
  const auto dim = dim_argument(call);
  auto factors = along(call, dim);
  auto& index = factors.inputs.back();
  if (!index.sizes.empty() && index.sizes.size() == call.tensors[0].sizes.size()) {
    index.factors[dim] = factors.add_factor(index.sizes[dim]);
  }
  factors.add_output(index, kAllOps);
  return factors;
}

/// self, index [, source]: the result has the shape of self; `dim` is whole in all.
Factorization scatter(const OpCall& call) {
  auto factors = along(call, dim_argument(call));
  factors.outputs.push_back(factors.inputs[0]);
  return factors;
}

/// self, index [n] (, source): rows of self; index and source are whole along `dim`.
Factorization write_rows(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs[0];
  const auto dim = dim_argument(call);
  if (!self.factors.empty()) self.factors[dim] = kNoFactor;
  if (call.tensors.size() > 2 && call.tensors[2].sizes.size() == self.sizes.size()) {
    const auto& source = call.tensors[2].sizes;
    for (int64_t d = 0; d < static_cast<int64_t>(source.size()); ++d) {
      TORCH_CHECK(d == dim || source[d] == self.sizes[d], call.name, ": the shape ", c10::IntArrayRef(source),
                  " of the source differs from that of the tensor, ", c10::IntArrayRef(self.sizes), ", in another dim than ",
                  dim);
    }
    factors.inputs[2] = equal_dims(self, source, dim);
  }
  factors.outputs.push_back(self);
  return factors;
}

Factorization index_select(const OpCall& call) {
  auto factors = first_input_factors(call);
  const auto dim = dim_argument(call);
  auto& self = factors.inputs[0];
  auto output = self;
  if (!self.factors.empty()) {
    const auto count = call.tensors[1].sizes.empty() ? 1 : call.tensors[1].sizes[0];
    self.factors[dim] = kNoFactor;
    output.factors[dim] = call.tensors[1].sizes.empty() ? kNoFactor : factors.add_factor(count);
    output.sizes[dim] = count;
    if (!call.tensors[1].sizes.empty()) factors.inputs[1].factors[0] = output.factors[dim];
  }
  factors.add_output(std::move(output), kAllOps);
  return factors;
}

/// Advanced indexing of input 0 by those after it.
struct Indexing {
  std::vector<const TensorArg*> indices; ///< one a dim of input 0, null for a dim that is taken whole
  size_t end;                            ///< of the inputs that are indices
  bool has_masks = false;
  std::vector<int64_t> block = {}; ///< the indices' own dims
};

Indexing read_indexing(const OpCall& call, size_t end) {
  Indexing indexing{{}, end};
  for (size_t i = 1; i < end; ++i) {
    const auto& tensor = call.tensors[i];
    indexing.indices.push_back(tensor.defined ? &tensor : nullptr);
    indexing.has_masks |= tensor.defined && (tensor.dtype == at::kBool || tensor.dtype == at::kByte);
    if (tensor.defined && !indexing.has_masks) indexing.block = at::infer_size(indexing.block, tensor.sizes);
  }
  indexing.indices.resize(call.tensors[0].sizes.size(), nullptr);
  return indexing;
}

/// The dims of what is indexed: those of the indices, `block`, and those that are taken whole.
TensorDims indexed_dims(const std::vector<const TensorArg*>& indices, const TensorDims& input, const TensorDims& block) {
  const auto place = place_of_block(indices, [](const TensorArg* tensor) { return tensor != nullptr; });
  TensorDims output;
  for (size_t d = 0; d < input.sizes.size(); ++d) {
    for (size_t b = 0; d == place && b < block.sizes.size(); ++b) output.add(block.factors[b], block.sizes[b]);
    if (!indices[d]) output.add(input.factors[d], input.sizes[d]);
  }
  return output;
}

/// Adds the inputs: the indexed dims are whole; the indices' own dims may be split, and every dim that is taken whole. The dims
/// of what is indexed.
TensorDims add_indexed(const OpCall& call, const Indexing& indexing, Factorization& factors) {
  const auto& self = call.tensors[0].sizes;
  TensorDims input{{}, self};
  for (size_t d = 0; d < self.size(); ++d) {
    input.factors.push_back(indexing.indices[d] ? kNoFactor : factors.add_factor(self[d]));
  }
  const auto block = fresh_dims(factors, indexing.block);
  factors.inputs.push_back(input);
  for (size_t i = 1; i < indexing.end; ++i) {
    factors.inputs.push_back(call.tensors[i].defined ? broadcast_dims(call.tensors[i].sizes, block) : TensorDims{});
  }
  return indexed_dims(indexing.indices, input, block);
}

Factorization index(const OpCall& call) {
  const auto indexing = read_indexing(call, call.tensors.size());
  if (indexing.has_masks) return whole_factors(call);
  Factorization factors;
  factors.add_output(add_indexed(call, indexing, factors), kAllOps);
  return factors;
}

/// The written tensor keeps its split where that leaves each rank one range of positions; positions and values are whole.
Factorization write_whole_values(const OpCall& call) {
  Factorization factors;
  for (const auto& tensor : call.tensors) factors.inputs.push_back(whole_dims(tensor.sizes));
  factors.outputs.push_back(factors.inputs[0]);
  const bool has_ranges = ragged_is_one_range(call.tensors[0].spec->placements());
  factors.map = [has_ranges](const Placement& placement, const Placements&, int64_t) {
    const bool is_kept =
        !is_partial(placement) && !is_strided(placement) && (has_ranges || !std::holds_alternative<RaggedShard>(placement));
    return is_kept ? std::vector<Placement>{placement} : std::vector<Placement>{};
  };
  return factors;
}

/// Whether a split of the written tensor leaves the dims whole that are indexed.
bool keeps_indexed_dims(const Placement& placement, const Indexing& indexing) {
  if (!is_sharded(placement)) return true;
  const auto* shard = std::get_if<Shard>(&placement);
  return shard && !indexing.indices[static_cast<size_t>(shard->dim)];
}

/// Values at positions, split as what is read there would be. Where they are added, the indices' own dims may be split as well:
/// the result is then a sum.
Factorization write_positions(const OpCall& call) {
  const auto indexing = read_indexing(call, call.tensors.size() - 1);
  const auto& placements = call.tensors[0].spec->placements();
  const bool keeps = std::all_of(placements.begin(), placements.end(),
                                 [&](const auto& placement) { return keeps_indexed_dims(placement, indexing); });
  if (indexing.has_masks || !keeps) return write_whole_values(call);
  Factorization factors;
  const auto indexed = add_indexed(call, indexing, factors);
  const auto& values = call.tensors.back().sizes;
  TORCH_CHECK_INDEX(at::is_expandable_to(values, indexed.sizes), call.name, ": the values' shape ", c10::IntArrayRef(values),
                    " cannot be broadcast to ", c10::IntArrayRef(indexed.sizes), ", the shape of what is indexed");
  factors.inputs.push_back(broadcast_dims(values, indexed));
  factors.outputs.push_back(factors.inputs[0]);
  if (call.flag("accumulate", false)) {
    for (auto& factor : factors.factors) factor.reduction = Partial{};
    factors.additive = {0};
  }
  return factors;
}

/// Writes of a tensor into a slice of another: the cut dims are whole.
Factorization write_slice(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs[0];
  if (self.sizes.empty()) return whole_factors(call); // an error of the operator
  const auto dim = dim_argument(call);
  self.factors[dim] = kNoFactor;
  const auto& source = call.tensors[1].sizes;
  const bool dropped = source.size() + 1 == self.sizes.size();
  TensorDims dims{{}, source};
  for (size_t d = 0; d < source.size(); ++d) {
    const auto of_self = dropped && static_cast<int64_t>(d) >= dim ? d + 1 : d;
    dims.factors.push_back(of_self < self.factors.size() && self.sizes[of_self] == source[d] ? self.factors[of_self] : kNoFactor);
  }
  factors.inputs[1] = std::move(dims);
  factors.outputs.push_back(self);
  return factors;
}

/// Padded dims are whole.
Factorization pad(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs[0];
  const auto amounts = call.integers("pad");
  TORCH_CHECK(amounts.size() % 2 == 0 && amounts.size() <= 2 * self.sizes.size(), call.name, ": ", amounts.size(),
              " pads for a tensor of ", self.sizes.size(), " dims; two a dim are needed, and no more");
  auto output = self;
  for (size_t i = 0; i * 2 + 1 < amounts.size(); ++i) {
    const auto d = self.sizes.size() - 1 - i;
    if (amounts[2 * i] == 0 && amounts[2 * i + 1] == 0) continue;
    self.factors[d] = output.factors[d] = kNoFactor;
    output.sizes[d] += amounts[2 * i] + amounts[2 * i + 1];
  }
  factors.outputs.push_back(std::move(output));
  return factors;
}

/// Repeated dims are whole.
Factorization repeat(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs[0];
  const auto repeats = call.integers("repeats");
  TensorDims output;
  const auto shift = repeats.size() - self.sizes.size();
  for (size_t d = 0; d < repeats.size(); ++d) {
    const bool kept = d >= shift && repeats[d] == 1;
    if (d >= shift && !kept) self.factors[d - shift] = kNoFactor;
    output.add(kept ? self.factors[d - shift] : kNoFactor, repeats[d] * (d >= shift ? self.sizes[d - shift] : 1));
  }
  factors.add_output(std::move(output), kAllOps);
  return factors;
}

} // namespace

void register_indexing(Registry& registry) {
  registry.add("index_put. _index_put_impl.", OnLocals(write_positions).run(index_put_local).with(Trait::kPlainIsReplicate));
  registry.add("gather", OnLocals(gather));
  registry.add("scatter scatter_add scatter_reduce", OnLocals(scatter));
  registry.add("index_add index_copy index_fill index_reduce", OnLocals(write_rows));
  registry.add("index_select", OnLocals(index_select));
  registry.add("index.Tensor index.Tensor_out _unsafe_index.Tensor", OnLocals(index).with(Trait::kPlainIsReplicate));
  registry.add("slice_scatter select_scatter", OnLocals(write_slice));
  registry.add("constant_pad_nd", OnLocals(pad));
  registry.add("repeat", OnLocals(repeat));
  registry.add(
      "nonzero masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount histc take put "
      "masked_scatter nonzero_static histogram repeat_interleave.Tensor searchsorted diagonal_scatter block_diag",
      OnLocals(whole_factors));
  registry.add("bucketize.Tensor", OnLocals(by_pattern("...,~->...")));
}

} // namespace tessera::internal::rules
