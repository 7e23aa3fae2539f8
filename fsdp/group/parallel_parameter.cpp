#include <tessera/fsdp/group/parallel_parameter.h>

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <variant>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/reads/gradient_terms.h>

namespace tessera::internal {

void check_parallel(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh) {
  const auto& spec = *dtensor_meta(parameter)->spec;
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: the parameter ", name, " is a DTensor already, ", spec.to_string(), problem...);
  };
  try {
    DeviceMesh::concatenate({mesh, spec.mesh()});
  } catch (const c10::Error& error) {
    check(false, ", and cannot be sharded over ", mesh.to_string(),
          " besides, which takes other dims of one mesh: ", error.what_without_backtrace());
  }
  for (const auto& placement : spec.placements()) {
    check(is_replicate(placement) || std::holds_alternative<Shard>(placement) || is_strided(placement),
          ", and only a parameter that is Shard, StridedShard or Replicate over other dims can be sharded further");
  }
}

SpecPtr spec_in_forward(const Spec& parallel, at::ScalarType dtype) {
  return Spec::intern(parallel.mesh(), parallel.placements(), parallel.sizes(), dtype);
}

namespace {

/// Along the shard dim, seen from the global tensor: of a dim that foreign dims have split before, each rank has a part of each
/// chunk.
Placement seen_globally(const Placement& along_shard, const Spec& parallel) {
  const auto* shard = std::get_if<Shard>(&along_shard);
  if (!shard) return along_shard;
  int64_t chunks = 1;
  for (size_t dim = 0; dim < parallel.placements().size(); ++dim) {
    const auto* other = std::get_if<Shard>(&parallel.placements()[dim]);
    if (other && other->dim == shard->dim) chunks *= parallel.mesh().size(static_cast<int64_t>(dim));
  }
  return chunks > 1 ? Placement(StridedShard{shard->dim, chunks}) : along_shard;
}

} // namespace

SpecPtr shard_further(const Spec& parallel, at::ScalarType dtype, const MeshRoles& roles, const Placement& along_shard,
                      ForeignDims order) {
  if (order == ForeignDims::kFirst) {
    auto nested = parallel.placements();
    const auto inner = roles.placements(along_shard);
    nested.append(inner.begin(), inner.end());
    return Spec::intern(DeviceMesh::concatenate({parallel.mesh(), roles.mesh()}), nested, parallel.sizes(), dtype);
  }
  auto placements = roles.placements(seen_globally(along_shard, parallel));
  placements.append(parallel.placements().begin(), parallel.placements().end());
  return Spec::intern(DeviceMesh::concatenate({roles.mesh(), parallel.mesh()}), placements, parallel.sizes(), dtype);
}

namespace {

struct BesideSplitSequences : torch::autograd::Function<BesideSplitSequences> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& leaf, const SpecPtr& spec,
                            const SpecPtr& gradient) {
    save_spec(context, gradient);
    return make_dtensor(leaf.detach(), spec);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto spec = saved_spec(context);
    constexpr auto* kLabel = "the gradient of a parameter beside split sequences";
    const auto given = gradient_as_dtensor(gradients[0], *spec, kLabel);
    return {to_local(differentiable_move(given, spec->mesh(), spec->placements(), kLabel), spec->placements()), {}, {}};
  }
};

} // namespace

at::Tensor beside_split_sequences(const at::Tensor& leaf, const DeviceMesh& mesh, int64_t split) {
  Placements terms(static_cast<size_t>(mesh.ndim()));
  const auto spec = Spec::intern(mesh, terms, leaf.sizes().vec(), leaf.scalar_type(), strides_like(leaf, leaf.sizes()));
  if (!needs_graph(leaf)) return make_dtensor(leaf.detach(), spec);
  terms[static_cast<size_t>(split)] = Partial{};
  return BesideSplitSequences::apply(leaf, spec, spec->with(terms));
}

namespace {

struct OfTerms : torch::autograd::Function<OfTerms> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& leaf, const SpecPtr& spec) {
    save_spec(context, spec);
    return make_dtensor(leaf.detach(), spec);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto spec = saved_spec(context);
    constexpr auto* kLabel = "the gradient of a parameter beside split activations";
    const auto given = gradient_as_dtensor(gradients[0], *spec, kLabel);
    if (dtensor_meta(given)->spec->placements() == Placements{Partial{}}) return {to_local(given, Placements{Partial{}}), {}};
    return {once(to_local(differentiable_move(given, spec->mesh(), spec->placements(), kLabel)), spec->mesh()), {}};
  }
};

} // namespace

bool gives_terms(const ShardedParameter& parameter) {
  return parameter.forward.mark && parameter.forward.parallel->is_replicated() &&
         parameter.forward.parallel->mesh().ndim() == 1 && parameter.forward.parallel->mesh().size() > 1 &&
         gives_terms(parameter.forward.mark);
}

at::Tensor as_parallel_of_terms(const at::Tensor& leaf, const Spec& parallel) {
  const auto spec = Spec::intern(parallel.mesh(), parallel.placements(), parallel.sizes(), leaf.scalar_type(),
                                 strides_like(leaf, leaf.sizes()));
  return needs_graph(leaf) ? OfTerms::apply(leaf, spec) : make_dtensor(leaf.detach(), spec);
}

at::Tensor once(const at::Tensor& whole, const DeviceMesh& mesh) {
  return mesh.local_rank() == 0 ? whole : at::zeros_like(whole);
}

bool is_packed(const Spec& parallel) {
  return std::any_of(parallel.placements().begin(), parallel.placements().end(), is_strided);
}

bool may_be_ragged(const Spec& parallel) { return first_part_is_largest(parallel.placements(), parallel.dim() - 1); }

LargestPart largest_part(const Spec& parallel) {
  const auto& shape = parallel.mesh().shape();
  const std::vector<int64_t> first(shape.size(), 0);
  LargestPart largest{local_box(parallel.sizes(), shape, first, parallel.placements()).sizes};
  for (size_t dim = 0; dim < largest.sizes.size(); ++dim) {
    int64_t parts = 1;
    for (size_t m = 0; m < shape.size(); ++m)
      parts *= shards_dim(parallel.placements()[m], static_cast<int64_t>(dim)) ? shape[m] : 1;
    if (largest.sizes[dim] * parts != parallel.sizes()[dim]) largest.last_uneven = dim;
  }
  return largest;
}

at::Tensor as_parallel(const at::Tensor& leaf, const Spec& parallel) {
  return from_local(leaf, parallel.mesh(), parallel.placements(), parallel.sizes(), parallel.strides());
}

} // namespace tessera::internal
