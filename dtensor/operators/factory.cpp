#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

namespace {

/// The values of the input do not matter.
std::vector<Placement> to_replicate(const Placement&, const Placements&, int64_t) { return {Replicate{}}; }
std::vector<Placement> partial_to_replicate(const Placement& input, const Placements&, int64_t) {
  return is_partial(input) ? std::vector<Placement>{Replicate{}} : std::vector<Placement>{};
}

/// The result has the input's shape and placement, not its values.
Factorization like(const OpCall& call) {
  auto factors = pointwise_factors(call);
  factors.map = partial_to_replicate;
  return factors;
}

/// new_zeros(size) and its kin: the input's placement for its own shape, Replicate for any other.
Factorization fresh(const OpCall& call) {
  const auto sizes = call.integers("size");
  auto factors = first_input_factors(call);
  if (sizes == call.tensors[0].sizes) {
    factors.outputs.push_back(factors.inputs[0]);
    factors.ragged = RaggedUse::kMerged;
    factors.map = partial_to_replicate;
  } else { // the input's placement does not matter, so it must cost nothing
    factors.outputs.push_back(whole_dims(sizes));
    factors.map = to_replicate;
  }
  return factors;
}

/// The part's dims lie in the order of the whole's, where it has as many: a RaggedShard merges some.
void fresh_local(const LocalCall& call) {
  const auto& sizes = call.outputs[0].local_sizes;
  const auto& strides = call.outputs[0].strides;
  *call.find("size") = sizes;
  if (auto* stride = call.find("stride")) {
    const bool told = strides && sizes.size() == strides->size();
    *stride = told ? at::infer_dense_strides(sizes, *strides) : contiguous_strides(sizes);
  }
  call.op.callBoxed(*call.stack);
}

} // namespace

void register_factories(Registry& registry) {
  registry.add("empty_like zeros_like ones_like full_like", OnLocals(like).run(run_in_format, KernelKind::kAnyOffsets));
  registry.add("rand_like randn_like randint_like", Decompose{});
  registry.add("new_empty new_zeros new_ones new_full new_empty_strided", OnLocals(fresh).run(fresh_local));
}

} // namespace tessera::internal::rules
