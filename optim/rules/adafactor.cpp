#include <tessera/optim/adafactor.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using AdafactorEntry = internal::Stepped<AdafactorParamState, AdafactorOptions>;
using internal::Box;
using internal::part_of;

const AdafactorOptions& checked(const AdafactorOptions& options) {
  internal::check_not_negative("Adafactor", "lr", options.lr());
  internal::check_not_negative("Adafactor", "eps2", options.eps2());
  internal::check_not_negative("Adafactor", "weight_decay", options.weight_decay());
  internal::check_not_negative("Adafactor", "eps1", options.eps1().value_or(0));
  TORCH_CHECK(options.beta2_decay() <= 0, "Adafactor: beta2_decay is ", options.beta2_decay(), "; it must not be above 0");
  TORCH_CHECK(options.d() >= 1, "Adafactor: d is ", options.d(), "; it must be at least 1");
  return options;
}

void register_adafactor() {
  [[maybe_unused]] static const bool done = [] {
    using State = AdafactorParamState;
    using Options = AdafactorOptions;
    register_optimizer<Adafactor, State, Options>("Adafactor",
                                                  {{"step", &State::step},
                                                   {"row_var", &State::row_var, StateLayout::kReplicated},
                                                   {"col_var", &State::col_var, StateLayout::kReplicated},
                                                   {"variance", &State::variance}},
                                                  {{"lr", &Options::lr},
                                                   {"beta2_decay", &Options::beta2_decay},
                                                   {"eps1", &Options::eps1},
                                                   {"eps2", &Options::eps2},
                                                   {"d", &Options::d},
                                                   {"weight_decay", &Options::weight_decay}});
    return true;
  }();
}

bool is_factored(const at::Tensor& parameter) { return parameter.dim() > 1; }

double eps1_of(const AdafactorEntry& entry) {
  if (entry.options->eps1()) return *entry.options->eps1();
  switch (entry.parameter.scalar_type()) {
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    case at::kHalf: return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16: return std::numeric_limits<c10::BFloat16>::epsilon();
    default: return std::numeric_limits<float>::epsilon();
  }
}

/// `sizes` with the last dim, or the one before it, made 1.
std::vector<int64_t> without(std::vector<int64_t> sizes, int64_t from_the_end) {
  sizes[sizes.size() - static_cast<size_t>(from_the_end)] = 1;
  return sizes;
}

/// The place in the row means, or the column means, of a box of the parameter.
Box place_of(const Box& box, int64_t from_the_end) {
  Box place = box;
  place.offsets[box.offsets.size() - static_cast<size_t>(from_the_end)] = 0;
  place.sizes = without(box.sizes, from_the_end);
  return place;
}

constexpr int64_t kRows = 1, kColumns = 2; // the dim over which their means go, from the end

void prepare(const AdafactorEntry& entry) {
  auto& state = *entry.state;
  state.step(state.step() + 1);
  if (state.row_var().defined() || state.variance().defined()) return;
  if (!is_factored(entry.parameter)) {
    state.variance(at::zeros_like(entry.parameter));
    return;
  }
  const auto sizes = entry.parameter.sizes().vec();
  state.row_var(internal::replicated_zeros(entry.parameter, without(sizes, kRows)));
  state.col_var(internal::replicated_zeros(entry.parameter, without(sizes, kColumns)));
}

at::Tensor squared_norm(const at::Tensor& part) {
  return at::linalg_vector_norm(part, 2, std::nullopt, false, at::kDouble).square().reshape({1});
}

/// This rank's share of: the squared norm of the parameter, the sums of squares of the gradient's rows, and of its columns.
at::Tensor own_sums(const AdafactorEntry& entry) {
  const auto gradient = part_of(entry.gradient).contiguous();
  std::vector<at::Tensor> sums{squared_norm(part_of(entry.parameter))};
  if (!is_factored(entry.parameter)) return sums[0];
  const auto sizes = entry.parameter.sizes().vec();
  const auto options = gradient.options().dtype(at::kDouble);
  const auto rows = at::zeros(without(sizes, kRows), options), columns = at::zeros(without(sizes, kColumns), options);
  for (const auto& [box, data] : internal::pieces_like(entry.gradient, gradient)) {
    const auto squares = data.to(at::kDouble).square();
    internal::narrow(rows, place_of(box, kRows)).add_(squares.sum(-kRows, true));
    internal::narrow(columns, place_of(box, kColumns)).add_(squares.sum(-kColumns, true));
  }
  sums.push_back(rows.view({-1}));
  sums.push_back(columns.view({-1}));
  return at::cat(sums);
}

/// Takes the means of the gradient's squares into the moments.
void update_moments(const AdafactorEntry& entry, const at::Tensor& sums) {
  auto& state = *entry.state;
  const double weight = std::pow(static_cast<double>(state.step()), entry.options->beta2_decay());
  if (!is_factored(entry.parameter)) {
    state.variance().lerp_(entry.gradient * entry.gradient, weight);
    return;
  }
  const auto lerp = [&](const at::Tensor& kept, const at::Tensor& sum, int64_t count) {
    const auto local = part_of(kept);
    if (local.numel() != sum.numel()) return; // outside the mesh
    const auto mean = sum.div(static_cast<double>(count)).view_as(local).to(local.dtype());
    const auto* meta = internal::dtensor_meta(kept);
    kept.lerp_(meta ? internal::make_dtensor(mean, meta->spec) : mean, weight);
  };
  const auto rows = state.row_var().numel(), columns = state.col_var().numel();
  lerp(state.row_var(), sums.narrow(0, 1, rows), entry.parameter.size(-1));
  lerp(state.col_var(), sums.narrow(0, 1 + rows, columns), entry.parameter.size(-2));
}

/// The update of this rank's part before it is clipped: the gradient over the root of its second moment.
at::Tensor own_update(const AdafactorEntry& entry) {
  const auto& state = *entry.state;
  const double eps1 = eps1_of(entry);
  const auto gradient = part_of(entry.gradient).contiguous();
  if (!is_factored(entry.parameter)) return part_of(state.variance()).clamp(eps1 * eps1).rsqrt_().mul_(gradient);
  auto update = at::empty_like(gradient);
  const auto rows = part_of(state.row_var()), columns = part_of(state.col_var());
  const auto means = rows.mean(-kColumns, true).clamp_(eps1);
  const auto targets = internal::pieces_like(entry.parameter, update);
  const auto pieces = internal::pieces_like(entry.gradient, gradient);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& box = pieces[i].box;
    const auto mean = internal::narrow(means, place_of(place_of(box, kRows), kColumns));
    const auto variance = internal::narrow(rows, place_of(box, kRows)).matmul(internal::narrow(columns, place_of(box, kColumns)));
    targets[i].data.copy_(variance.div_(mean).clamp_(eps1 * eps1).rsqrt_().mul_(pieces[i].data));
  }
  return update;
}

/// Writes the parameter, given the squared norms of it (before the step) and of its update.
void apply(AdafactorEntry& entry, const at::Tensor& parameter_square, const at::Tensor& update_square) {
  const auto& options = *entry.options;
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(entry.parameter.numel(), 1)));
  const double rho = std::min(options.lr(), 1 / std::sqrt(static_cast<double>(entry.state->step())));
  const auto alpha = parameter_square.sqrt().div_(root).clamp_(options.eps2()).mul_(-rho);
  const auto factor = alpha / update_square.sqrt().div_(root * options.d()).clamp_(1);
  if (options.weight_decay() != 0) entry.parameter.mul_(1 - options.lr() * options.weight_decay());
  const auto update = own_update(entry).mul_(factor);
  const auto* meta = internal::dtensor_meta(entry.parameter);
  entry.parameter.add_(meta ? internal::make_dtensor(update, meta->spec) : update);
}

} // namespace

Adafactor::Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdafactorOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<AdafactorOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const AdafactorOptions&>(group.options()));
  register_adafactor();
}

Adafactor::Adafactor(std::vector<at::Tensor> parameters, const AdafactorOptions& defaults)
    : Adafactor({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

// The updates are computed twice, because those of all parameters at once would take the memory of the gradients again.
void Adafactor::update() {
  auto entries = internal::stepped_parameters<AdafactorParamState, AdafactorOptions>(*this);
  std::vector<internal::ShareOfSums> shares, norms;
  for (const auto& entry : entries) {
    prepare(entry);
    shares.push_back({entry.parameter, own_sums(entry)});
  }
  const auto sums = internal::shared_sums(shares, "the moments of Adafactor");
  for (size_t i = 0; i < entries.size(); ++i) {
    update_moments(entries[i], sums[i]);
    norms.push_back({entries[i].parameter, squared_norm(own_update(entries[i]))});
  }
  const auto squares = internal::shared_sums(norms, "the norms of Adafactor");
  for (size_t i = 0; i < entries.size(); ++i) apply(entries[i], sums[i][0], squares[i][0]);
}

} // namespace tessera
