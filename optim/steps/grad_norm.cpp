#include <tessera/optim/grad_norm.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <variant>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/kernels/flat_values.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/optim/state/tensor_values.h>
#include <tessera/optim/steps/norm_of_parts.h>

namespace tessera {

namespace {

using internal::NormOf;

constexpr auto* kLabel = "clip_grad_norm_";

/// Tensors that lie on one mesh, as this rank has them.
struct OnMesh {
  const DeviceMesh* mesh; ///< null: plain tensors
  std::vector<SpecPtr> specs = {};
  std::vector<at::Tensor> parts = {};
  std::vector<bool> shards = {}; ///< for each dim of the mesh, whether it splits one of them
};

bool is_on(const OnMesh& group, const DeviceMesh* mesh) { return mesh && group.mesh ? *group.mesh == *mesh : group.mesh == mesh; }

/// A gradient that waits for its reduction says so.
void check_reduced(const at::Tensor& gradient) {
  if (const auto meta = internal::dtensor_meta(gradient)) meta->check_has_values(kLabel);
}

at::Tensor without_partial(const at::Tensor& tensor) {
  check_reduced(tensor);
  const auto* meta = internal::dtensor_meta(tensor);
  if (!meta || !meta->spec->has_partial()) return tensor;
  auto placements = meta->spec->placements();
  for (auto& each : placements) {
    if (std::holds_alternative<Partial>(each)) each = Replicate();
  }
  return DTensor(tensor).redistribute(placements);
}

OnMesh& group_on(const DeviceMesh* mesh, std::vector<OnMesh>& groups) {
  const auto group = std::find_if(groups.begin(), groups.end(), [&](const OnMesh& other) { return is_on(other, mesh); });
  return group != groups.end() ? *group : groups.emplace_back(OnMesh{.mesh = mesh});
}

void note_shards(const Spec& spec, OnMesh& group) {
  const auto& placements = spec.placements();
  group.shards.resize(placements.size());
  for (size_t d = 0; d < placements.size(); ++d)
    group.shards[d] = group.shards[d] || !std::holds_alternative<Replicate>(placements[d]);
}

/// Of a parameter without a gradient its mesh counts: other ranks, which may have one, reduce along it.
std::vector<OnMesh> by_mesh(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters) {
  std::vector<OnMesh> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) {
      const auto* of_parameter = i < parameters.size() ? internal::dtensor_meta(parameters[i]) : nullptr;
      if (of_parameter) note_shards(*of_parameter->spec, group_on(&of_parameter->spec->mesh(), groups));
      continue;
    }
    const auto tensor = without_partial(tensors[i]);
    const auto* meta = internal::dtensor_meta(tensor);
    auto& group = group_on(meta ? &meta->spec->mesh() : nullptr, groups);
    group.parts.push_back(meta ? meta->local : tensor.requires_grad() ? tensor.detach() : tensor);
    if (!meta) continue;
    if (group.specs.empty() || group.specs.back() != meta->spec) note_shards(*meta->spec, group);
    group.specs.push_back(meta->spec);
  }
  return groups;
}

/// Counts the ranks of a reduction along `dims` that have the same part.
double copies(const DeviceMesh& mesh, const Spec& spec, const std::vector<bool>& dims) {
  double product = 1;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] && std::holds_alternative<Replicate>(spec.placements()[d])) product *= mesh.size(static_cast<int64_t>(d));
  }
  return product;
}

/// Whether all ranks of `inner`, but not all of `outer`, are in both.
bool is_within(const DeviceMesh& inner, const DeviceMesh& outer) {
  return inner.size() < outer.size() && std::all_of(inner.ranks().begin(), inner.ranks().end(),
                                                    [&](int64_t rank) { return outer.rank_list().index_of(rank).has_value(); });
}

/// Reduces between the ranks along `dims` of the mesh, in place.
void reduce_along(const at::Tensor& values, const DeviceMesh& mesh, const std::vector<bool>& dims, ReduceOp op) {
  const auto count = std::count(dims.begin(), dims.end(), true);
  if (mesh.size() == 1 || count == 0) return;
  const auto communicator = count > 1 ? process_context().communicator(mesh.rank_list(), mesh.device_type())
                                      : mesh.communicator(std::find(dims.begin(), dims.end(), true) - dims.begin());
  communicator->all_reduce(values.view({-1}), op, kLabel).wait();
}

/// What goes along with the tensors of a mesh, from each of its ranks.
struct Passengers {
  std::vector<at::Tensor> plain = {};  ///< tensors that it has for itself
  std::vector<at::Tensor> values = {}; ///< of meshes within this one, each divided by the number of its ranks
  bool empty() const { return plain.empty() && values.empty(); }
};

/// The value over all ranks of a mesh.
at::Tensor value_on(const OnMesh& group, const Passengers& others, NormOf norm) {
  const auto& mesh = *group.mesh;
  auto dims = group.shards;
  const bool over_all = std::count(dims.begin(), dims.end(), true) > 1 || !others.empty();
  if (over_all) std::fill(dims.begin(), dims.end(), true);
  auto parts = group.parts;
  std::vector<double> weights;
  weights.reserve(group.specs.size());
  for (size_t i = 0; i < group.specs.size(); ++i) {
    const bool is_as_before = i > 0 && group.specs[i] == group.specs[i - 1];
    weights.push_back(is_as_before ? weights.back() : 1 / copies(mesh, *group.specs[i], dims));
  }
  parts.insert(parts.end(), others.plain.begin(), others.plain.end());
  weights.resize(parts.size(), 1 / static_cast<double>(mesh.size()));
  auto values = others.values;
  values.push_back(internal::norm_of_parts(parts, weights, norm, mesh.device()));
  auto value = internal::joined(std::move(values), norm);
  reduce_along(value, mesh, dims, norm.op());
  return value;
}

/// The value of all groups together. Plain tensors go with the widest mesh, and so do the values of the meshes within it: its
/// other ranks may have other tensors on meshes of their own (experts).
at::Tensor value_of_all(const std::vector<OnMesh>& groups, NormOf norm) {
  const OnMesh* widest = nullptr;
  Passengers passengers;
  for (const auto& group : groups) {
    if (!group.mesh) passengers.plain = group.parts;
    if (group.mesh && (!widest || group.mesh->size() > widest->mesh->size())) widest = &group;
  }
  const auto& plain = passengers.plain;
  if (!widest) return internal::norm_of_parts(plain, std::vector<double>(plain.size(), 1), norm, plain[0].device());
  std::vector<at::Tensor> values;
  for (const auto& group : groups) {
    if (!group.mesh || &group == widest) continue;
    const auto value = value_on(group, {}, norm);
    const bool is_inside = is_within(*group.mesh, *widest->mesh);
    const double ranks = norm.is_extreme() ? 1 : static_cast<double>(group.mesh->size());
    if (is_inside) passengers.values.push_back(value / ranks);
    if (!is_inside) values.push_back(value);
  }
  values.push_back(value_on(*widest, passengers, norm));
  return internal::joined(std::move(values), norm);
}

/// For each tensor of the group 1 where an element of it is not zero on some rank, otherwise 0: as one tensor, whose sum is the
/// count.
OnMesh nonzero_flags(const OnMesh& group) {
  const auto device = group.mesh ? group.mesh->device() : group.parts[0].device();
  std::vector<at::Tensor> flags;
  for (const auto& part : group.parts) flags.push_back(internal::summed_values(part).ne(0).any().to(device, at::kDouble));
  OnMesh counted{.mesh = group.mesh, .parts = {at::stack(flags)}};
  if (!group.mesh) return counted;
  reduce_along(counted.parts[0], *group.mesh, group.shards, ReduceOp::kMax);
  const Placements whole(group.shards.size(), Replicate());
  counted.specs = {Spec::intern(*group.mesh, whole, {static_cast<int64_t>(flags.size())}, at::kDouble)};
  counted.shards.resize(whole.size());
  return counted;
}

/// The tensors that are not zero everywhere.
at::Tensor count_nonzero(const std::vector<OnMesh>& groups) {
  std::vector<OnMesh> flags;
  for (const auto& group : groups) flags.push_back(nonzero_flags(group));
  return value_of_all(flags, {1});
}

/// Zeros in the place of gradients that other ranks may have: these then reduce as many flags.
std::vector<at::Tensor> with_zeros(std::vector<at::Tensor> tensors, const std::vector<at::Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* meta = internal::dtensor_meta(parameters[i]);
    if (!tensors[i].defined() && meta) tensors[i] = internal::make_dtensor(at::zeros_like(meta->local), meta->spec);
  }
  return tensors;
}

/// Without those that were listed before: LibTorch's `parameters()` lists a tied weight by each of its names.
std::vector<at::Tensor> distinct(std::vector<at::Tensor> parameters) {
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  seen.reserve(parameters.size());
  std::erase_if(parameters, [&](const auto& each) { return !seen.insert(each.unsafeGetTensorImpl()).second; });
  return parameters;
}

at::ScalarType dtype_of(const std::vector<at::Tensor>& tensors) {
  auto dtype = at::kFloat;
  for (const auto& each : tensors) {
    if (each.defined()) dtype = c10::promoteTypes(dtype, c10::toRealValueType(each.scalar_type()));
  }
  return dtype;
}

/// `parameters`: those that the tensors are the gradients of, or none.
at::Tensor total_norm(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& parameters, double norm_type,
                      bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(!std::isnan(norm_type), "get_total_norm: the type of the norm is NaN");
  const at::NoGradGuard no_grad;
  const auto groups = by_mesh(norm_type == 0 ? with_zeros(tensors, parameters) : tensors, parameters);
  if (groups.empty()) return at::zeros({}, at::kFloat);
  at::Tensor total;
  if (norm_type == 0) {
    total = count_nonzero(groups);
  } else {
    total = value_of_all(groups, {norm_type});
    if (!std::isinf(norm_type)) total = total.pow(1 / norm_type);
  }
  total = total.to(dtype_of(tensors));
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total.item<double>()), "The total norm of order ", norm_type,
              " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this error and scale the "
              "gradients with the non-finite norm anyway, set `error_if_nonfinite=false`");
  return total;
}

/// Gradients on the CPU. To multiply by 1 would change nothing.
void multiply(const std::vector<at::Tensor>& flat, const at::Tensor& factor) {
  if (flat.empty()) return;
  const auto value = factor.item<double>();
  if (value != 1) internal::multiply_flat(flat, value);
}

/// The parameters are listed once.
void clip_own(const std::vector<at::Tensor>& own, double max_norm, const at::Tensor& total_norm) {
  const at::NoGradGuard no_grad;
  constexpr double kLeast = 1e-6; // as PyTorch has it
  const auto factor = total_norm.add(kLeast).reciprocal().mul(max_norm).clamp_max(1.0);
  std::vector<at::Tensor> flat;
  std::map<std::pair<at::ScalarType, c10::DeviceType>, std::vector<at::Tensor>> alike;
  for (const auto& parameter : own) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    check_reduced(gradient);
    const auto* meta = internal::dtensor_meta(gradient);
    auto values = meta ? meta->local : internal::stored_values(gradient);
    auto& those =
        values.itemsize() >= 4 && internal::is_flat(values) ? flat : alike[{values.scalar_type(), values.device().type()}];
    those.push_back(std::move(values));
  }
  // First what may refuse to be written: then nothing is clipped. A narrow type would round the factor, or make it 0.
  for (const auto& [kind, gradients] : alike) {
    const auto real = c10::toRealValueType(kind.first);
    at::_foreach_mul_(gradients, factor.to(gradients[0].device(), c10::elementSize(real) < 4 ? at::kFloat : real));
  }
  multiply(flat, factor);
}

} // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type, bool error_if_nonfinite) {
  return total_norm(tensors, {}, norm_type, error_if_nonfinite);
}

// NOLINTNEXTLINE(readability-identifier-naming)
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm) {
  clip_own(distinct(parameters), max_norm, total_norm);
}

// NOLINTNEXTLINE(readability-identifier-naming)
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite) {
  internal::check_not_stepped_in_backward(parameters, "clip_grad_norm_ needs the gradients of all parameters");
  const auto own = distinct(parameters);
  std::vector<at::Tensor> gradients;
  gradients.reserve(own.size());
  for (const auto& each : own) gradients.push_back(each.grad());
  auto total = total_norm(gradients, own, norm_type, error_if_nonfinite);
  clip_own(own, max_norm, total);
  return total;
}

} // namespace tessera
