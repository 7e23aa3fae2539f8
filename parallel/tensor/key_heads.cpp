#include <tessera/parallel/tensor/key_heads.h>

#include <ATen/ops/arange.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/program_scopes.h>
#include <tessera/parallel/tensor/style.h>

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

/// Whether `spec` lies on the ranks of `line` in rows, each group with a part of the heads.
bool is_split_over_groups(const Spec& spec, const DeviceMesh& line) {
  return dispatch::PlannedMeshes::instance().line_of(spec.mesh()) == line &&
         spec.placements() == Placements{Shard{kHeads}, Replicate{}};
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ReadInGroups : torch::autograd::Function<ReadInGroups> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& whole, const DeviceMesh& groups,
                            std::optional<int64_t> cut) {
    const auto& meta = meta_of(whole, "a layer of key heads");
    save_spec(context, meta.spec);
    const auto& spec = *meta.spec;
    auto local = meta.local.detach();
    if (cut) {
      const auto rows = spec.sizes()[static_cast<size_t>(*cut)] / groups.size(0);
      local = local.narrow(*cut, groups.local_rank(0) * rows, rows);
    }
    const Placements placements{cut ? Placement(Shard{*cut}) : Placement(Replicate{}), Replicate{}};
    const auto own = Spec::intern(groups, placements, spec.sizes(), spec.dtype(), strides_like(local, spec.sizes()));
    save_spec(context, own, "own");
    auto result = make_dtensor(local, own);
    if (!whole.is_inference() && !result.is_inference()) // autograd saves it, and is to see writes
      result.unsafeGetTensorImpl()->set_version_counter(whole.unsafeGetTensorImpl()->version_counter());
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto line = saved_spec(context), own = saved_spec(context, "own");
    constexpr auto* kLabel = "the gradient of a layer of key heads";
    const auto given = gradient_as_dtensor(gradients[0], *own, kLabel);
    const auto& mesh = dtensor_meta(given)->spec->mesh();
    const Placements terms(static_cast<size_t>(mesh.ndim()), Partial{});
    const auto sum = differentiable_move(given, mesh, terms, kLabel);
    if (mesh == line->mesh()) return {sum, {}, {}};
    return {from_terms(sum, line), {}, {}};
  }

  /// The terms of a sum over the groups as those of one over the line.
  static at::Tensor from_terms(const at::Tensor& sum, const SpecPtr& line) {
    const auto terms = Spec::intern(line->mesh(), {Partial{}}, line->sizes(), sum.scalar_type());
    if (!needs_graph(sum)) return make_dtensor(dtensor_meta(sum)->local.contiguous(), terms);
    return from_local(to_local(sum, Placements(2)), terms->mesh(), terms->placements(), terms->sizes());
  }
};

} // namespace

DeviceMesh in_groups(const DeviceMesh& line, int64_t heads) {
  const auto groups = std::gcd(line.size(), heads);
  if (groups == 1) return {};
  std::vector<std::string> names;
  if (!line.dim_names().empty()) names = {line.dim_names()[0] + "_groups", line.dim_names()[0] + "_in_group"};
  return line.unflatten(0, {groups, line.size() / groups}, names);
}

at::Tensor read_in_groups(const at::Tensor& whole, const DeviceMesh& groups, std::optional<int64_t> cut) {
  return ReadInGroups::apply(in_graph(whole), groups, cut);
}

void join_groups(ReadCall& call) {
  if (C10_LIKELY(!dispatch::PlannedMeshes::instance().has_groups()) || call.traits.is_metadata_only) return;
  DeviceMesh groups;
  std::optional<DeviceMesh> line;
  dispatch::visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    const auto found = meta && !line ? dispatch::PlannedMeshes::instance().line_of(meta->spec->mesh()) : std::nullopt;
    if (!found) return;
    groups = meta->spec->mesh();
    line = found;
  });
  if (!line) return;
  call.replace([&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    const auto* meta = call.traits.arguments[argument].written ? nullptr : styled_meta(tensor);
    const bool is_whole = meta && meta->spec->mesh() == *line && meta->spec->is_replicated();
    return is_whole ? std::optional(read_in_groups(tensor, groups, std::nullopt)) : std::nullopt;
  });
}

at::Tensor on_line(const at::Tensor& activation, const DeviceMesh& line, const std::string& label) {
  const auto& mesh = dtensor_meta(activation)->spec->mesh();
  if (dispatch::PlannedMeshes::instance().line_of(mesh) != line || program_scopes().strict_sharding) return activation;
  return differentiable_move(activation, line, {Replicate{}}, label.c_str());
}

bool has_more_key_heads(const at::Tensor& query, const at::Tensor& key, bool is_grouped) {
  const auto *meta = dtensor_meta(query), *key_meta = dtensor_meta(key);
  if (!meta || !key_meta || query.dim() != 4 || key.dim() != 4) return false;
  const auto dim = dim_of_heads(*meta->spec);
  if (!dim) return false;
  const auto heads = query.size(kHeads), key_heads = key.size(kHeads);
  const auto ranks = meta->spec->mesh().size(static_cast<int64_t>(*dim));
  if (key_heads == 0 || heads % key_heads != 0 || heads % ranks != 0) return false;
  if (is_split_over_groups(*key_meta->spec, meta->spec->mesh())) return is_grouped || heads == key_heads;
  return is_grouped && meta->spec->mesh() == key_meta->spec->mesh() && is_replicate(key_meta->spec->placements()[*dim]) &&
         key_heads % ranks != 0;
}

at::Tensor own_key_heads(const at::Tensor& query, const at::Tensor& key) {
  const auto &spec = *dtensor_meta(query)->spec, &key_spec = *dtensor_meta(key)->spec;
  const bool is_whole = key_spec.mesh() == spec.mesh();
  const auto dim = *dim_of_heads(spec);
  const auto ranks = spec.mesh().size(static_cast<int64_t>(dim)), group = query.size(kHeads) / key.size(kHeads);
  const auto first = spec.local_offsets()[kHeads], count = spec.local_sizes()[kHeads];
  auto gradients = key_spec.placements(), placements = is_whole ? key_spec.placements() : Placements{Shard{kHeads}};
  gradients[is_whole ? dim : 1] = Partial{};
  placements[dim] = Shard{kHeads};
  const auto held = to_local(key, gradients);
  const auto held_first = key_spec.local_offsets()[kHeads];
  auto sizes = key.sizes().vec();
  const bool is_range = group % count == 0 || count % group == 0;
  if (is_range) {
    const auto seen = std::max<int64_t>(count / group, 1);
    sizes[kHeads] = ranks * seen;
    return from_local(held.narrow(kHeads, first / group - held_first, seen), spec.mesh(), placements, sizes);
  }
  sizes[kHeads] = query.size(kHeads);
  const auto of_queries = at::arange(first, first + count, held.options().dtype(at::kLong)).floor_divide_(group).sub_(held_first);
  return from_local(held.index_select(kHeads, of_queries), spec.mesh(), placements, sizes);
}

} // namespace tessera::internal::parallel
