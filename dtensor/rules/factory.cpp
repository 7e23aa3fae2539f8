#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/sharding_math.h>

namespace tessera::rules {

namespace {

/// The result has the input's shape and placement, not its values.
Factorization like(const OpCall& call) {
  auto factors = pointwise_factors(call);
  factors.partial.push_back({.inputs = 1, .ops = kAllOps, .output_is_replicate = true});
  return factors;
}

/// new_zeros(size) and its kin: the input's placement for its own shape, Replicate for any other.
Factorization fresh(const OpCall& call) {
  const auto sizes = call.integers("size");
  auto factors = first_input_factors(call);
  if (sizes == call.tensors[0].sizes) {
    factors.outputs.push_back(factors.inputs[0]);
    factors.merges_leading = true;
  } else { // the input's placement does not matter, so it must cost nothing
    factors.outputs.push_back({absl::InlinedVector<int, 6>(sizes.size(), kNoFactor), sizes});
    factors.map = [](const Placement&, const Placements&, int64_t) { return std::vector<Placement>{Replicate{}}; };
  }
  factors.partial.push_back({.inputs = 1, .ops = kAllOps, .output_is_replicate = true});
  return factors;
}

/// Dense strides for `sizes` whose dims lie in the order of `like`.
std::vector<int64_t> strides_in_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& like) {
  if (like.size() != sizes.size()) return contiguous_strides(sizes);
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return like[a] > like[b]; });
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  std::reverse(order.begin(), order.end());
  for (const auto d : order) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

void fresh_local(const LocalCall& call) {
  call.arg(call.find("size")) = call.outputs[0].local_sizes;
  const int stride = call.find("stride");
  if (stride >= 0) call.arg(stride) = strides_in_order(call.outputs[0].local_sizes, call.outputs[0].strides);
  call.op.callBoxed(*call.stack);
}

} // namespace

void register_factories(Registry& registry) {
  registry.add("empty_like zeros_like ones_like full_like", {.factorize = like});
  registry.add("rand_like randn_like randint_like", {.decompose = true});
  registry.add("new_empty new_zeros new_ones new_full new_empty_strided", {.factorize = fresh, .local = fresh_local});
}

} // namespace tessera::rules
