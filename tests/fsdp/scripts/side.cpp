#include "side.h"

#include <tessera/collectives/process_context.h>

#include <algorithm>

namespace tessera::testing::scripts {

void Trainee::take(const Sharding& sharding) {
  is_exact = is_exact && !sharding.rounds_to_float;
  computes_in_float = computes_in_float || sharding.computes_in_float;
  ignores = sharding.ignores;
}

void Trainee::forget_state() {
  for (auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
  hooks.clear();
  snapshots.clear();
  several.clear();
  model->zero_grad();
}

void Trainee::forget_optimizer() {
  snapshots.clear();
  several.clear();
  schedule.reset();
  make_schedule = {};
}

Tensor Side::part(const Tensor& batch, const std::vector<int64_t>& rows_of_ranks) const {
  return part(batch, rows_of_ranks, sharded ? std::optional<int64_t>(process_context().rank()) : std::nullopt);
}

Tensor Side::part(const Tensor& batch, const std::vector<int64_t>& rows_of_ranks, std::optional<int64_t> rank) const {
  return rank ? batch.split_with_sizes(rows_of_ranks)[static_cast<size_t>(*rank)].to(device()) : batch;
}

void Side::record(const Tensor& tensor) {
  const auto value = whole(tensor).cpu();
  recorded.push_back({(value.is_complex() ? torch::view_as_real(value) : value).to(torch::kDouble).sum().item<double>(), false});
}

Tensor random_values(const Tensor& like, Draw& draw) {
  auto generator = at::detail::createCPUGenerator(draw.seed());
  const auto dtype = like.is_complex() ? torch::kComplexDouble : torch::kDouble;
  return (torch::randn(like.sizes(), generator, dtype) * 0.3).to(like.device(), like.scalar_type());
}

Tensor laid_out_as(const Tensor& values, const Tensor& like) {
  if (!is_dtensor(like)) return values;
  const DTensor model(like);
  auto on_device = distribute_tensor(values, model.mesh(), model.placements());
  if (on_device.device() == like.device()) return on_device;
  const torch::NoGradGuard no_grad; // an offloaded parameter
  return torch::empty_like(like).copy_(on_device);
}

bool lie_on_one_mesh(const std::vector<Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& each) {
    const auto& first = tensors[0];
    if (each.device() != first.device() || is_dtensor(each) != is_dtensor(first)) return false;
    return !is_dtensor(each) || DTensor(each).mesh() == DTensor(first).mesh();
  });
}

Tensor whole(const Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor.detach();
}

} // namespace tessera::testing::scripts
