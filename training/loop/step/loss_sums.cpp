#include <tessera/training/loop/step/loss_sums.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include <tessera/dtensor/api.h>

namespace tessera::internal {

namespace {

/// A number without dims, without history, in double.
at::Tensor number_of(const at::Tensor& tensor, const std::string& what) {
  TORCH_CHECK_VALUE(tensor.defined(), what, " is an undefined tensor");
  TORCH_CHECK_VALUE(tensor.dim() == 0, what, " has the shape ", tensor.sizes(), ", but must be a number without dims");
  TORCH_CHECK_VALUE(!tensor.is_complex(), what, " is ", tensor.scalar_type(), ", which has no order");
  const at::NoGradGuard no_grad;
  const auto value = tensor.detach();
  return (is_dtensor(value) ? DTensor(value).full_tensor() : value).to(at::kDouble);
}

std::vector<std::string> agree_on_names(const std::vector<std::string>& own, const Agreement& agreement) {
  const auto all = agreement.texts(fmt::format("{}", fmt::join(own, ", ")));
  const std::set<std::string> distinct(all.begin(), all.end());
  TORCH_CHECK_VALUE(distinct.size() == 1,
                    "Trainer: the ranks have other numbers beside the loss: ", fmt::format("{}", fmt::join(distinct, "; ")));
  return own;
}

} // namespace

double LossSums::Sum::total() const {
  if (values.empty()) return 0;
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) tensors.push_back(value.tensor);
  const auto host = at::stack(tensors).cpu();
  const auto* numbers = host.const_data_ptr<double>();
  double total = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].weight != 0) total += numbers[i] * values[i].weight; // the mean of nothing is NaN
  }
  return total;
}

at::Tensor LossSums::add(const Loss& loss, double count, const std::string& name, Agreement& agreement) {
  const auto* sum = std::get_if<LossSum>(&loss);
  const auto& tensor = sum ? sum->sum : std::get<LossMean>(loss).mean;
  const auto& own_count = sum ? sum->count : std::get<LossMean>(loss).count;
  loss_.values.push_back({number_of(tensor, "the loss of " + name), sum ? 1 : count});
  loss_.count += count;
  if (own_count && *own_count != count)
    agreement.note(
        fmt::format("the loss of {} counts {}, but before the forward its count was {}: give the trainer a count() that "
                    "returns what the loss counts",
                    name, *own_count, count));
  if (!sum && count == 0)
    agreement.note(fmt::format("the loss of {} is a mean, but counts nothing: return its sum, a LossSum", name));
  for (const auto& [key, number] : sum ? sum->also : std::get<LossMean>(loss).also) {
    auto& also = also_[key];
    also.values.push_back({number_of(number.sum, fmt::format("\"{}\" of {}", key, name)), 1});
    also.count += number.count;
  }
  return tensor;
}

LossSums::Means LossSums::reduce(Agreement& agreement, AgreedNames& names, Beside& beside) const {
  std::vector<std::string> own;
  for (const auto& [name, sum] : also_) own.push_back(name);
  if (!names) names = agree_on_names(own, agreement);
  if (own != *names)
    agreement.note(
        fmt::format("the numbers beside the loss are \"{}\", but were \"{}\"", fmt::join(own, ", "), fmt::join(*names, ", ")));
  const double total = loss_.total();
  const bool is_finite = std::isfinite(total);
  auto& sums = beside.sums;
  const auto first = sums.size();
  sums.insert(sums.end(), {total, loss_.count, is_finite ? 0.0 : 1.0, agreement.has_failed() ? 1.0 : 0.0});
  for (const auto& name : *names) {
    const auto found = also_.find(name);
    sums.push_back(found == also_.end() ? 0 : found->second.total());
    sums.push_back(found == also_.end() ? 0 : found->second.count);
  }
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  beside.maxima.push_back(!is_finite ? -kNone : loss_.count > 0 ? total / loss_.count : kNone);
  agreement.reduce(sums, beside.maxima, "the loss of a step");
  if (sums[first + 3] > 0) agreement.throw_failures();

  Means means{.loss = sums[first] / sums[first + 1],
              .max_loss = beside.maxima.back(),
              .count = sums[first + 1] / static_cast<double>(agreement.copies()),
              .is_finite = sums[first + 2] == 0};
  for (size_t i = 0; i < names->size(); ++i) means.also[(*names)[i]] = sums[first + 4 + 2 * i] / sums[first + 5 + 2 * i];
  beside.maxima.pop_back();
  sums.resize(first);
  return means;
}

} // namespace tessera::internal
