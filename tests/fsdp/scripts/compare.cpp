#include "compare.h"

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/sharding_math.h>

#include <algorithm>
#include <cmath>
#include <numeric>

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

std::string difference(const Tensor& expected, const Tensor& got, double tolerance) {
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
  const auto error = (actual.to(dtype) - wanted.to(dtype)).abs() / (1 + wanted.to(dtype).abs());
  const auto largest = error.max().item<double>();
  const double bound = expected.scalar_type() == torch::kBFloat16 ? std::max(tolerance, 2e-2) : tolerance;
  return largest <= bound ? "" : c10::str(" differs by ", largest);
}

template <typename Visit>
void visit_tensors(const Side& side, const Visit& visit) {
  for (size_t i = 0; i < side.trainees.size(); ++i) {
    const auto& trainee = side.trainees[i];
    const auto of_model = " of model " + std::to_string(i);
    for (const auto& item : trainee.model->named_parameters()) {
      visit("parameter " + item.key() + of_model, item.value());
      if (!trainee.gradients_wait) visit("gradient of " + item.key() + of_model, item.value().grad());
    }
    for (const auto& item : trainee.model->named_buffers()) visit("buffer " + item.key() + of_model, item.value());
  }
}

} // namespace

int64_t sum_over_ranks(int64_t value) {
  auto sum = torch::tensor({value}, torch::kLong);
  world()->all_reduce(sum, ReduceOp::kSum, "agreement").wait();
  return sum.item<int64_t>();
}

std::string difference_of_recorded(const Side& plain, const Side& sharded, double tolerance) {
  std::vector<double> values;
  for (const auto& each : sharded.recorded) values.push_back(each.value);
  auto means = torch::tensor(values, torch::kDouble);
  if (!values.empty()) world()->all_reduce(means, ReduceOp::kAvg, "recorded").wait();
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = plain.recorded[i].value;
    const double got = sharded.recorded[i].is_mean ? means[static_cast<int64_t>(i)].item<double>() : values[i];
    if (!(std::abs(got - expected) <= tolerance * (1 + std::abs(expected))))
      return c10::str("number ", i, " is ", got, ", not ", expected);
  }
  return "";
}

std::string difference_of_state(const Side& plain, const Side& sharded, double tolerance) {
  std::vector<Tensor> expected;
  visit_tensors(plain, [&](const std::string&, const Tensor& tensor) { expected.push_back(tensor); });
  std::string found;
  size_t i = 0;
  visit_tensors(sharded, [&](const std::string& name, const Tensor& tensor) {
    const auto different = difference(expected[i++], tensor, tolerance);
    if (found.empty() && !different.empty()) found = name + different;
  });
  return found;
}

bool is_bounded(const Side& plain, double largest) {
  bool bounded = std::all_of(plain.recorded.begin(), plain.recorded.end(),
                             [=](const auto& each) { return std::abs(each.value) <= largest; });
  visit_tensors(plain, [&](const std::string&, const Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto size = tensor.is_complex() ? tensor.detach().abs() : tensor.detach().to(torch::kDouble).abs();
    bounded = bounded && (size <= largest).all().item<bool>();
  });
  return bounded;
}

} // namespace tessera::testing::scripts
