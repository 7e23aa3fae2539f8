#include <tessera/optim/steps/norm_of_parts.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_pow.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <tessera/optim/kernels/flat_values.h>
#include <tessera/optim/state/tensor_values.h>

namespace tessera::internal {

namespace {

/// Dense tensors of one kind, and what each counts.
struct Weighted {
  std::vector<at::Tensor> parts = {};
  std::vector<double> weights = {};
  void add(at::Tensor part, double weight) {
    parts.push_back(std::move(part));
    weights.push_back(weight);
  }
};

at::Tensor value_of(const Weighted& some, NormOf norm) {
  const auto options = some.parts[0].options().dtype(at::kDouble);
  auto norms = at::_foreach_norm(some.parts, norm.type);
  for (auto& each : norms) each = each.to(options);
  if (norm.is_extreme()) return joined(std::move(norms), norm);
  // The weights go along as arguments: a copy of them to a device would wait for all that it does.
  const std::vector<at::Scalar> weights(some.weights.begin(), some.weights.end());
  return at::stack(at::_foreach_mul(at::_foreach_pow(norms, norm.type), weights)).sum();
}

} // namespace

at::Tensor joined(std::vector<at::Tensor> values, NormOf norm) {
  if (values.size() == 1) return values[0];
  for (auto& each : values) each = each.to(values[0].device());
  const auto all = at::stack(values);
  return !norm.is_extreme() ? all.sum() : norm.type > 0 ? all.amax() : all.amin();
}

at::Tensor norm_of_parts(const std::vector<at::Tensor>& parts, const std::vector<double>& weights, NormOf norm,
                         c10::Device device) {
  std::map<c10::DeviceType, Weighted> by_device;
  Weighted flat; // whose squares are added up in one pass
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto values = summed_values(parts[i]);
    if (values.numel() == 0) continue;
    if (norm.type == 2 && is_flat(values)) {
      flat.add(values, weights[i]);
    } else {
      by_device[values.device().type()].add(values.itemsize() < 4 ? values.to(at::kFloat) : values, weights[i]);
    }
  }
  const double of_none = norm.is_extreme() && norm.type < 0 ? std::numeric_limits<double>::infinity() : 0.0;
  const auto options = at::TensorOptions(at::kDouble).device(device);
  std::vector<at::Tensor> values;
  if (!flat.parts.empty()) values.push_back(at::full({}, weighted_squares(flat.parts, flat.weights), options));
  for (const auto& [type, some] : by_device) values.push_back(value_of(some, norm).to(device));
  return values.empty() ? at::full({}, of_none, options) : joined(std::move(values), norm);
}

} // namespace tessera::internal
