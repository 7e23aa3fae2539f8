#include <tessera/optim/parts/shared_sums.h>

#include <ATen/ops/cat.h>

#include <algorithm>
#include <variant>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

/// The shares that the same dims of one mesh add up.
struct Together {
  DeviceMesh mesh;
  std::vector<int64_t> dims;
  std::vector<size_t> shares = {};
};

std::vector<int64_t> splitting_dims(const Spec& spec) {
  std::vector<int64_t> dims;
  for (size_t d = 0; d < spec.placements().size(); ++d) {
    if (!std::holds_alternative<Replicate>(spec.placements()[d])) dims.push_back(static_cast<int64_t>(d));
  }
  return dims;
}

std::vector<Together> groups_of(const std::vector<ShareOfSums>& shares) {
  std::vector<Together> groups;
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto* meta = dtensor_meta(shares[i].parameter);
    if (!meta || !meta->spec->on_mesh()) continue;
    const auto dims = splitting_dims(*meta->spec);
    if (dims.empty()) continue;
    const auto same = [&](const Together& other) { return other.dims == dims && other.mesh == meta->spec->mesh(); };
    const auto found = std::find_if(groups.begin(), groups.end(), same);
    auto& group = found != groups.end() ? *found : groups.emplace_back(Together{meta->spec->mesh(), dims});
    group.shares.push_back(i);
  }
  return groups;
}

} // namespace

std::vector<at::Tensor> shared_reduction(const std::vector<ShareOfSums>& shares, ReduceOp op, std::string_view label) {
  std::vector<at::Tensor> reduced;
  reduced.reserve(shares.size());
  for (const auto& share : shares) reduced.push_back(share.values);
  for (const auto& [mesh, dims, members] : groups_of(shares)) {
    std::vector<at::Tensor> values;
    for (const auto i : members) values.push_back(shares[i].values.to(mesh.device()));
    const auto all = at::cat(values);
    for (const auto dim : dims) mesh.communicator(dim)->all_reduce(all, op, label).wait();
    int64_t position = 0;
    for (const auto i : members) {
      const auto length = shares[i].values.numel();
      reduced[i] = all.narrow(0, position, length).to(shares[i].values.device());
      position += length;
    }
  }
  return reduced;
}

at::Tensor part_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor.detach();
}

std::vector<Piece> pieces_like(const at::Tensor& like, const at::Tensor& part) {
  const auto* meta = dtensor_meta(like);
  if (meta && !meta->spec->on_mesh()) return {};
  if (meta) return pieces_of_part(part, *meta->spec, *meta->spec->mesh().coordinate());
  return {{whole(part.sizes().vec()), part}};
}

} // namespace tessera::internal
