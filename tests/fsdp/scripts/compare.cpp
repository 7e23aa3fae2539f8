#include "compare.h"

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/layout/sharding_math.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tessera::testing::scripts {
namespace {

std::shared_ptr<Communicator> world() {
  std::vector<int64_t> ranks(static_cast<size_t>(process_context().world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return process_context().communicator(ranks, torch::kCPU, "scripts");
}

/// The elements of `whole` that this rank holds of `dtensor`.
Tensor part_of(const Tensor& whole, const DTensor& dtensor) {
  const auto box = internal::local_box(whole.sizes(), dtensor.mesh(), dtensor.placements());
  const auto flattened = whole.dim() - static_cast<int64_t>(box.sizes.size());
  Tensor part = flattened > 0 ? whole.flatten(0, flattened) : flattened < 0 ? whole.reshape({1}) : whole;
  for (int64_t d = 0; d < part.dim(); ++d) {
    const auto i = static_cast<size_t>(d);
    part = part.narrow(d, std::min(box.offsets[i], part.size(d)), box.sizes[i]);
  }
  return part;
}

/// What an optimizer makes of gradients that cancel, and what is computed after its step.
constexpr double kSmall = 0.25;
constexpr double kSmallestInHalf = 1e-4; ///< what is smaller has fewer bits

/// What a difference is relative to, of each element of `part`, beside numbers of the size `small` that may have cancelled.
Tensor scale_of(const Tensor& part, const Tensor& whole, Tolerance::Of of, double small) {
  if (of == Tolerance::Of::kElement) return 1 + part.abs();
  return whole.detach().abs().max().to(torch::kDouble) + small;
}

std::string difference(const Tensor& expected, const Tensor& got, const Tolerance& tolerance, double small) {
  const torch::NoGradGuard no_grad;
  if (expected.defined() != got.defined()) return got.defined() ? " is defined" : " is not defined";
  if (!expected.defined()) return "";
  if (expected.sizes() != got.sizes()) return c10::str(" has the shape ", got.sizes(), ", not ", expected.sizes());
  const auto actual = (is_dtensor(got) ? DTensor(got).local() : got.detach()).cpu();
  auto wanted = is_dtensor(got) ? part_of(expected.detach(), DTensor(got)) : expected.detach();
  if (wanted.numel() != actual.numel()) return c10::str(" has a part of ", actual.sizes(), ", not ", wanted.sizes());
  if (wanted.numel() == 0) return "";
  wanted = wanted.reshape(actual.sizes());
  const auto dtype = wanted.is_complex() ? torch::kComplexDouble : torch::kDouble;
  const auto error = (actual.to(dtype) - wanted.to(dtype)).abs() / scale_of(wanted.to(dtype), expected, tolerance.of, small);
  const auto largest = error.max().item<double>();
  const double bound = expected.scalar_type() == torch::kBFloat16 ? std::max(tolerance.bound, 2e-2) : tolerance.bound;
  return largest <= bound ? "" : c10::str(" differs by ", largest);
}

/// Each rank's gradients were rounded before they cancelled.
double size_before_reduction(const Trainee& trainee, const Tensor& parameter) {
  const auto size = trainee.emulation ? trainee.emulation->size_of_gradients(parameter) : std::nullopt;
  return size ? *size + kSmallestInHalf : kSmall;
}

/// Calls `visit` with the name and the numbers of each, and the size of what may have cancelled in these.
template <typename Visit>
void visit_tensors(const Side& side, const Visit& visit) {
  for (size_t i = 0; i < side.trainees.size(); ++i) {
    const auto& trainee = side.trainees[i];
    const auto of_model = " of model " + std::to_string(i);
    for (const auto& item : trainee.model->named_parameters()) {
      visit("parameter " + item.key() + of_model, item.value(), kSmall);
      if (!trainee.gradients_wait)
        visit("gradient of " + item.key() + of_model, item.value().grad(), size_before_reduction(trainee, item.value()));
    }
    for (const auto& item : trainee.model->named_buffers()) visit("buffer " + item.key() + of_model, item.value(), kSmall);
  }
}

} // namespace

int64_t sum_over_ranks(int64_t value) {
  auto sum = torch::tensor({value}, torch::kLong);
  world()->all_reduce(sum, ReduceOp::kSum, "agreement").wait();
  return sum.item<int64_t>();
}

std::string difference_of_recorded(const Side& plain, const Side& sharded, const Tolerance& tolerance) {
  std::vector<double> values;
  for (const auto& each : sharded.recorded) values.push_back(each.value);
  auto means = torch::tensor(values, torch::kDouble);
  if (!values.empty()) world()->all_reduce(means, ReduceOp::kAvg, "recorded").wait();
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = plain.recorded[i].value;
    const double got = sharded.recorded[i].is_mean ? means[static_cast<int64_t>(i)].item<double>() : values[i];
    const double bound = std::max(tolerance.bound, plain.recorded[i].rounding);
    if (!(std::abs(got - expected) <= bound * (1 + std::abs(expected))))
      return c10::str("number ", i, sharded.recorded[i].what, " is ", got, ", not ", expected);
  }
  return "";
}

std::string difference_of_state(const Side& plain, const Side& sharded, const Tolerance& tolerance) {
  std::vector<std::pair<Tensor, double>> all;
  visit_tensors(plain, [&](const std::string&, const Tensor& tensor, double small) { all.emplace_back(tensor, small); });
  std::string found;
  size_t i = 0;
  visit_tensors(sharded, [&](const std::string& name, const Tensor& tensor, double) {
    const auto& [expected, small] = all[i++];
    const auto different = difference(expected, tensor, tolerance, small);
    if (found.empty() && !different.empty()) found = name + different;
  });
  return found;
}

bool is_bounded(const Side& plain, double largest) {
  bool bounded = std::all_of(plain.recorded.begin(), plain.recorded.end(),
                             [=](const auto& each) { return std::abs(each.value) <= largest; });
  visit_tensors(plain, [&](const std::string&, const Tensor& tensor, double) {
    if (!tensor.defined()) return;
    const auto size = tensor.is_complex() ? tensor.detach().abs() : tensor.detach().to(torch::kDouble).abs();
    bounded = bounded && (size <= largest).all().item<bool>();
  });
  return bounded;
}

} // namespace tessera::testing::scripts
