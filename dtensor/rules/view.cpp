#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/sharding_math.h>

namespace tessera::rules {

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

/// A split of the row-major elements as a placement of another shape: the fewest leading dims whose cuts fall between positions.
std::optional<Placement> from_ranges(const std::vector<Extent>& ranges, const std::vector<int64_t>& sizes) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto trailing = product(sizes, dim + 1, sizes.size());
    RaggedShard ragged{static_cast<int64_t>(dim), {}};
    bool fits = trailing > 0, chunks = dim == 0;
    for (size_t r = 0; r < ranges.size() && fits; ++r) {
      fits = ranges[r].size % trailing == 0;
      ragged.extents.push_back(ranges[r].size / trailing);
      chunks = chunks &&
               ragged.extents[r] == chunk_extent(sizes[0], static_cast<int64_t>(ranges.size()), static_cast<int64_t>(r)).size;
    }
    if (fits && chunks) return Shard{0};
    if (fits) return ragged;
  }
  return std::nullopt;
}

/// Splits of dim 0 and ragged splits survive any reshape: they are ranges of the row-major elements.
PlacementMap map_ranges(const OpCall& call, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  return [mesh = call.mesh, from, to, spec = call.tensors[0].spec](const Placement& placement,
                                                                   const Placements& others) -> std::optional<Placement> {
    const bool alone = std::none_of(others.begin(), others.end(), [](const Placement& other) { return is_sharded(other); });
    if (!alone || !is_sharded(placement) || product(from, 0, from.size()) == 0) return std::nullopt;
    const auto* shard = std::get_if<Shard>(&placement);
    if (shard && shard->dim != 0) return std::nullopt;
    size_t mesh_dim = 0;
    while (spec->placements()[mesh_dim] != placement) ++mesh_dim;
    const auto ranks = mesh.size(static_cast<int64_t>(mesh_dim));
    const auto* ragged = std::get_if<RaggedShard>(&placement);
    const auto scale = product(from, ragged ? ragged->dim + 1 : 1, from.size());
    std::vector<Extent> ranges;
    for (int64_t r = 0; r < ranks; ++r) {
      ranges.push_back({0, (ragged ? ragged->extents[r] : chunk_extent(from[0], ranks, r).size) * scale});
    }
    return from_ranges(ranges, to);
  };
}

/// Pairs the dims of two shapes of the same numel: equal runs share one factor, the first dim of a split or merged run an even
/// one.
Factorization reshape_factors(const OpCall& call, const std::vector<int64_t>& to) {
  const auto& from = call.tensors[0].sizes;
  Factorization factors;
  TensorDims input{{}, from}, output{{}, to};
  input.factors.resize(from.size(), kNoFactor);
  output.factors.resize(to.size(), kNoFactor);
  const bool empty = product(from, 0, from.size()) == 0;
  size_t i = 0, j = 0;
  while (!empty && (i < from.size() || j < to.size())) {
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
    const bool plain = i == first_in + 1 && j == first_out + 1;
    const int factor = factors.add_factor(std::gcd(from[first_in], to[first_out]));
    factors.factors[factor].even_only = !plain;
    input.factors[first_in] = output.factors[first_out] = factor;
  }
  if (empty && from == to) {
    for (size_t d = 0; d < from.size(); ++d) input.factors[d] = output.factors[d] = factors.add_factor(from[d]);
  }
  factors.inputs.push_back(std::move(input));
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kAllOps));
  factors.map = map_ranges(call, from, to);
  factors.leading_whole = false; // `map` serves RaggedShard
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
  const auto ndim = static_cast<int64_t>(from.size());
  std::vector<bool> drop(from.size(), !call.find("dim"));
  for (auto dim : call.integers("dim")) {
    const auto bound = std::max<int64_t>(ndim, 1);
    TORCH_CHECK_INDEX(dim >= -bound && dim < bound, call.name, ": dimension ", dim, " is out of range for a tensor of ", ndim,
                      " dims");
    if (ndim > 0) drop[dim < 0 ? dim + ndim : dim] = true;
  }
  std::vector<int64_t> to;
  for (size_t d = 0; d < from.size(); ++d) {
    if (!drop[d] || from[d] != 1) to.push_back(from[d]);
  }
  return reshape_factors(call, to);
}

/// Views the local tensor in the output's local shape.
void view_local(const LocalCall& call) { call.finish(call.arg(0).toTensor().view(call.outputs[0].local_sizes)); }

void reshape_local(const LocalCall& call) { call.finish(call.arg(0).toTensor().reshape(call.outputs[0].local_sizes)); }

/// `order[d]`: the input dim that becomes output dim d.
Factorization permuted(const OpCall& call, const std::vector<int64_t>& order) {
  auto factors = first_input_factors(call);
  TensorDims output;
  for (const auto d : order) {
    output.factors.push_back(factors.inputs[0].factors[d]);
    output.sizes.push_back(call.tensors[0].sizes[d]);
  }
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kAllOps));
  return factors;
}

Factorization permute(const OpCall& call) {
  auto order = call.integers("dims");
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  TORCH_CHECK(static_cast<int64_t>(order.size()) == ndim, call.name, ": ", order.size(), " dims given for a tensor of ", ndim);
  for (auto& d : order) {
    TORCH_CHECK_INDEX(d >= -ndim && d < ndim, call.name, ": dimension ", d, " is out of range for a tensor of ", ndim, " dims");
    if (d < 0) d += ndim;
  }
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
    output.factors.push_back(kept ? input.factors[d - shift] : kNoFactor);
    output.sizes.push_back(to[d]);
    if (old && !kept) input.factors[d - shift] = kNoFactor;
  }
  factors.leading_whole = shift == 0;
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kAllOps));
  return factors;
}

void expand_local(const LocalCall& call) { call.finish(call.arg(0).toTensor().expand(call.outputs[0].local_sizes)); }

/// Dim `dim` is cut: it must be whole. The outputs get `sizes` there (the dim is dropped for -1).
Factorization cut(const OpCall& call, int64_t dim, const std::vector<int64_t>& sizes) {
  auto factors = first_input_factors(call);
  factors.inputs[0].factors[dim] = kNoFactor;
  for (const auto size : sizes) {
    auto output = factors.inputs[0];
    if (size < 0) {
      output.factors.erase(output.factors.begin() + dim);
      output.sizes.erase(output.sizes.begin() + dim);
    } else {
      output.sizes[dim] = size;
    }
    factors.outputs.push_back(std::move(output));
  }
  factors.leading_whole = dim > 0;
  factors.partial.push_back(flow(1, kAllOps));
  return factors;
}

Factorization slice(const OpCall& call) {
  const auto& sizes = call.tensors[0].sizes;
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size()));
  TORCH_CHECK(!sizes.empty(), call.name, " needs a tensor with dims");
  const auto size = sizes[dim], step = call.integer("step", 1);
  const auto bound = [size](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size); };
  const auto start = bound(call.integer("start", 0)), end = std::max(start, bound(call.integer("end", size)));
  if (start == 0 && end == size && step == 1) {
    std::vector<int64_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    return permuted(call, order);
  }
  return cut(call, dim, {(end - start + step - 1) / step});
}

/// A slice that takes all of a split dim takes all of the local one, whatever its end.
void slice_local(const LocalCall& call) {
  const auto local = call.arg(0).toTensor();
  auto dim = call.arg(call.find("dim")).toInt();
  if (dim < 0) dim += local.dim();
  if (call.inputs[0]->sizes()[dim] != local.size(dim)) return call.finish(local.slice(dim));
  call.op.callBoxed(*call.stack);
}

Factorization select(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  TORCH_CHECK_INDEX(ndim > 0, call.name, " needs a tensor with dims");
  return cut(call, call.dim("dim", ndim), {-1});
}

Factorization unbind(const OpCall& call) {
  const auto& sizes = call.tensors[0].sizes;
  TORCH_CHECK_INDEX(!sizes.empty(), call.name, " needs a tensor with dims");
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size()));
  return cut(call, dim, std::vector<int64_t>(sizes[dim], -1));
}

Factorization split(const OpCall& call) {
  const auto& sizes = call.tensors[0].sizes;
  TORCH_CHECK(!sizes.empty(), call.name, " needs a tensor with dims");
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size()));
  if (call.find("split_sizes")) return cut(call, dim, call.integers("split_sizes"));
  const auto part = call.integer("split_size", 1), size = sizes[dim];
  TORCH_CHECK(part > 0 || (part == 0 && size == 0), call.name, ": split size ", part, " for a dim of size ", size);
  std::vector<int64_t> parts;
  for (int64_t at = 0; at < size; at += part) parts.push_back(std::min(part, size - at));
  if (parts.empty()) parts.push_back(0);
  return cut(call, dim, parts);
}

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
    output.factors.push_back(input.factors[d]);
    output.sizes.push_back(sizes[d]);
  }
  output.factors.push_back(kNoFactor);
  output.sizes.push_back(std::max<int64_t>(0, std::min(rows, columns)));
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kAllOps));
  return factors;
}

/// Shares the meta with its source, so that both stay the same DTensor.
void alias(const c10::OperatorHandle&, std::vector<c10::IValue>* stack) {
  auto result = alias_dtensor(stack->back().toTensor());
  stack->back() = std::move(result);
}

} // namespace

void register_views(Registry& registry) {
  registry.add("detach alias lift lift_fresh", {.handler = alias, .view = true});
  registry.add("view.", {.factorize = view, .local = view_local, .view = true});
  registry.add("_reshape_alias", {.factorize = view, .local = view_local, .view = true});
  registry.add("_unsafe_view view_copy. _reshape_copy reshape_copy", {.factorize = view, .local = reshape_local});
  registry.add("unsqueeze", {.factorize = unsqueeze, .local = view_local, .view = true});
  registry.add("squeeze", {.factorize = squeeze, .local = view_local, .view = true});
  registry.add("permute", {.factorize = permute, .view = true});
  registry.add("transpose.int", {.factorize = transpose, .view = true});
  registry.add("t", {.factorize = t, .view = true});
  registry.add("expand", {.factorize = expand, .local = expand_local, .view = true});
  registry.add("slice.Tensor", {.factorize = slice, .local = slice_local, .view = true});
  registry.add("select.int", {.factorize = select, .view = true});
  registry.add("unbind.int", {.factorize = unbind, .view = true});
  registry.add("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes", {.factorize = split, .view = true});
  registry.add("diagonal", {.factorize = diagonal, .view = true});
}

} // namespace tessera::rules
