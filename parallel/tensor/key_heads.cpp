#include <tessera/parallel/tensor/key_heads.h>

#include <ATen/ops/arange.h>

#include <optional>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::parallel {

namespace {

constexpr int64_t kHeads = 1;

/// The one mesh dim that splits the heads of a tensor of 4 dims.
std::optional<size_t> dim_of_heads(const Spec& spec) {
  std::optional<size_t> found;
  for (size_t dim = 0; dim < spec.placements().size(); ++dim) {
    if (!shards_dim(spec.placements()[dim], kHeads)) continue;
    if (found || !std::holds_alternative<Shard>(spec.placements()[dim])) return std::nullopt;
    found = dim;
  }
  return found;
}

} // namespace

bool has_whole_key_heads(const at::Tensor& query, const at::Tensor& key) {
  const auto *meta = dtensor_meta(query), *key_meta = dtensor_meta(key);
  if (!meta || !key_meta || query.dim() != 4 || key.dim() != 4 || meta->spec->mesh() != key_meta->spec->mesh()) return false;
  const auto dim = dim_of_heads(*meta->spec);
  if (!dim || !is_replicate(key_meta->spec->placements()[*dim])) return false;
  const auto heads = query.size(kHeads), key_heads = key.size(kHeads);
  const auto ranks = meta->spec->mesh().size(static_cast<int64_t>(*dim));
  return key_heads > 0 && heads % key_heads == 0 && heads % ranks == 0 && key_heads % ranks != 0;
}

at::Tensor own_key_heads(const at::Tensor& query, const at::Tensor& key) {
  const auto &spec = *dtensor_meta(query)->spec, &key_spec = *dtensor_meta(key)->spec;
  const auto dim = *dim_of_heads(spec);
  const auto ranks = spec.mesh().size(static_cast<int64_t>(dim)), group = query.size(kHeads) / key.size(kHeads);
  const auto first = spec.local_offsets()[kHeads], count = spec.local_sizes()[kHeads];
  auto gradients = key_spec.placements(), placements = key_spec.placements();
  gradients[dim] = Partial{};
  placements[dim] = Shard{kHeads};
  const auto whole = to_local(key, gradients);
  const bool is_one = group % count == 0;
  const auto own = is_one ? whole.narrow(kHeads, first / group, 1)
                          : whole.index_select(
                                kHeads, at::arange(first, first + count, whole.options().dtype(at::kLong)).floor_divide_(group));
  auto sizes = key.sizes().vec();
  sizes[kHeads] = is_one ? ranks : query.size(kHeads);
  return from_local(own, spec.mesh(), placements, sizes);
}

} // namespace tessera::internal::parallel
