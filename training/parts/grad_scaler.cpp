#include <tessera/training/grad_scaler.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/gradients/loss_scale_watch.h>
#include <tessera/fsdp/gradients/unreduced_gradient.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/optim/parts/optimizer_ranks.h>
#include <tessera/optim/state/tensor_values.h>
#include <tessera/optim/step.h>

namespace tessera {

namespace {

constexpr auto* kOverflowCheck = "the overflow check of GradScaler";

void check_factor(const char* name, double value, double above, double below) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value > above && value < below, "GradScaler: ", name, " is ", value,
                    ", but must be above ", above, std::isfinite(below) ? c10::str(" and below ", below) : "");
}

/// A scale is kept as a float.
void check_scale(const char* name, double value) {
  constexpr auto kLargest = std::numeric_limits<float>::max();
  TORCH_CHECK_VALUE(value <= kLargest && static_cast<float>(value) > 0, "GradScaler: ", name, " is ", value,
                    ", but must be above 0 and at most ", kLargest, " as a float");
}

/// Once each: the `parameters()` of LibTorch's modules list a tied one under each of its names.
template <typename Visit> // void(const at::Tensor& parameter)
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Visit& visit) {
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) visit(parameter);
    }
  }
}

/// The part of a gradient that this rank has.
at::Tensor part_of(const at::Tensor& gradient) {
  if (internal::unreduced_gradient(gradient)) return gradient.abs(); // which says what it waits for
  if (const auto* meta = internal::dtensor_meta(gradient)) return meta->local;
  return internal::stored_values(gradient);
}

/// Its name, where `fully_shard` gave it one.
std::string name_of(const at::Tensor& parameter) {
  const auto* meta = internal::dtensor_meta(parameter);
  return meta && meta->provenance.name ? meta->provenance.name->to_string()
                                       : c10::str("a parameter of shape ", parameter.sizes());
}

/// Divides those of one dtype. CUDA's kernel does not know bf16: such parts are divided in float, one after the other.
void divide(const std::vector<at::Tensor>& parts, at::Tensor& found, const at::Tensor& inverse) {
  if (parts[0].scalar_type() != at::kBFloat16) return at::_amp_foreach_non_finite_check_and_unscale_(parts, found, inverse);
  for (const auto& part : parts) {
    const auto wide = part.to(at::kFloat);
    at::_amp_foreach_non_finite_check_and_unscale_({wide}, found, inverse);
    part.copy_(wide);
  }
}

/// Divides the parts in place; `overflow`, a number, becomes 1 where one of them is not finite.
void unscale(const std::vector<at::Tensor>& parts, const at::Tensor& overflow, float scale) {
  std::vector<at::Tensor> left = parts;
  while (!left.empty()) { // those of one device and dtype at a time
    const auto first = left.front();
    const auto is_alike = [&](const at::Tensor& each) {
      return each.device() == first.device() && each.scalar_type() == first.scalar_type();
    };
    const auto rest = std::stable_partition(left.begin(), left.end(), is_alike);
    const std::vector<at::Tensor> alike(left.begin(), rest);
    left.erase(left.begin(), rest);
    auto found = at::zeros({}, first.options().dtype(at::kFloat));
    const auto inverse = at::full({}, static_cast<float>(1 / static_cast<double>(scale)), found.options());
    divide(alike, found, inverse);
    overflow.add_(found.to(overflow.device()));
  }
}

/// The first of the optimizer's gradients that is not finite on each rank, a line a rank. All of `ranks` call it.
std::string overflows_of(const torch::optim::Optimizer& optimizer, const std::vector<int64_t>& ranks) {
  const at::NoGradGuard no_grad;
  std::string own;
  std::optional<c10::Device> device;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    if (!device) device = part_of(parameter).device();
    if (!own.empty() || !parameter.grad().defined()) return;
    const auto part = part_of(parameter.grad());
    const auto bad = part.numel() - at::isfinite(part).sum().item<int64_t>();
    if (bad > 0) own = c10::str(name_of(parameter), ", ", bad, " of the ", part.numel(), " numbers there");
  });
  std::vector<std::string> texts{own};
  if (ranks.size() > 1) {
    const auto communicator = process_context().communicator(ranks, device.value_or(c10::kCPU).type(), "grad scaler");
    texts = internal::gather_texts(own, *communicator, device.value_or(c10::kCPU), kOverflowCheck);
  }
  std::string lines;
  for (size_t index = 0; index < texts.size(); ++index) {
    if (texts[index].empty()) continue;
    const auto rank = ranks.size() > 1 ? ranks[index] : internal::rank_for_errors();
    lines += c10::str("\n  rank ", rank, ": the first gradient that is not finite is that of ", texts[index]);
  }
  return lines;
}

} // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : options_(std::move(options)), scale_(static_cast<float>(options_.init_scale)), overflows_left_(options_.hysteresis) {
  check_scale("init_scale", options_.init_scale);
  set_growth_factor(options_.growth_factor);
  set_backoff_factor(options_.backoff_factor);
  set_growth_interval(options_.growth_interval);
  TORCH_CHECK_VALUE(options_.hysteresis >= 1, "GradScaler: hysteresis is ", options_.hysteresis, ", but must be at least 1");
  TORCH_CHECK_VALUE(options_.min_scale >= 0 && options_.min_scale <= options_.init_scale, "GradScaler: min_scale is ",
                    options_.min_scale, ", but must be between 0 and init_scale, which is ", options_.init_scale);
}

void GradScaler::set_growth_factor(double factor) {
  check_factor("growth_factor", factor, 1, std::numeric_limits<double>::infinity());
  options_.growth_factor = factor;
}

void GradScaler::set_backoff_factor(double factor) {
  check_factor("backoff_factor", factor, 0, 1);
  options_.backoff_factor = factor;
}

void GradScaler::set_growth_interval(int64_t interval) {
  TORCH_CHECK_VALUE(interval >= 1, "GradScaler: growth_interval is ", interval, ", but must be at least 1");
  options_.growth_interval = interval;
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled) return outputs;
  has_scaled_ = true;
  internal::LossScaleWatch::instance().was_scaled = true;
  // In PyTorch the scale is a tensor, which makes a Float of a number: in half precision few scaled losses are finite.
  const bool is_number = outputs.dim() == 0;
  return (is_number ? outputs.to(c10::promoteTypes(outputs.scalar_type(), at::kFloat)) : outputs).mul(scale_);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const auto& each : outputs) scaled.push_back(scale(each));
  return scaled;
}

bool GradScaler::find_overflow(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& ranks) const {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups())
    internal::check_not_stepped_in_backward(group.params(), "GradScaler looks for infinities in the gradients of all parameters");
  std::vector<at::Tensor> parts;
  std::optional<c10::Device> device;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    TORCH_CHECK_NOT_IMPLEMENTED(!parameter.is_complex() || !parameter.requires_grad(), "GradScaler: ", name_of(parameter), " is ",
                                parameter.scalar_type(),
                                ", and nothing unscales complex gradients: train in bf16 or fp32 with a ",
                                "scaler that is not enabled, or register the parameter as real numbers (torch::view_as_real)");
    if (!device) device = part_of(parameter).device(); // of its gradient too, on the ranks that have one
    if (parameter.grad().defined()) parts.push_back(part_of(parameter.grad()));
  });
  const auto options = at::TensorOptions(at::kFloat).device(device.value_or(c10::kCPU));
  const auto found = at::zeros({2}, options); // an overflow, and a gradient
  if (!parts.empty()) found.select(0, 1).fill_(1);
  unscale(parts, found.narrow(0, 0, 1), scale_);
  if (ranks.size() > 1) {
    const auto communicator = process_context().communicator(ranks, options.device().type(), "grad scaler");
    communicator->all_reduce(found, ReduceOp::kMax, kOverflowCheck).wait();
  }
  const auto on_host = found.to(at::kCPU);
  const auto* values = on_host.const_data_ptr<float>();
  TORCH_CHECK(values[1] > 0, "GradScaler: no parameter of the optimizer has a gradient, on any rank: call it after backward");
  return values[0] > 0;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) { // NOLINT(readability-identifier-naming): PyTorch's name
  if (!options_.enabled) return;
  TORCH_CHECK(has_scaled_, "GradScaler: no loss was scaled since the last update on rank ", internal::rank_for_errors(),
              ", and the gradients would be divided by the scale ", scale_, ": call scaler.scale(loss).backward()");
  const auto known = optimizers_.find(&optimizer);
  TORCH_CHECK(known == optimizers_.end() || known->second.has_stepped,
              "GradScaler: unscale_() was called on this optimizer since the last update()");
  TORCH_CHECK(known == optimizers_.end(), "GradScaler: unscale_() is called after step()");
  OptimizerState state{options_.mesh.defined() ? options_.mesh.ranks() : internal::ranks_of(optimizer)};
  state.overflowed = find_overflow(optimizer, state.ranks);
  if (state.overflowed && !reason_not_to_fall().empty()) state.overflows = overflows_of(optimizer, state.ranks);
  optimizers_.emplace(&optimizer, std::move(state)); // not where the check threw: that is no good step
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (options_.enabled) {
    const auto known = optimizers_.find(&optimizer);
    TORCH_CHECK(known == optimizers_.end() || !known->second.has_stepped,
                "GradScaler: step() was called on this optimizer since the last update()");
    if (known == optimizers_.end()) unscale_(optimizer);
    auto& state = optimizers_.at(&optimizer);
    state.has_stepped = true;
    if (state.overflowed) return false;
  }
  tessera::step(optimizer);
  return true;
}

float GradScaler::fallen() const {
  return std::max(scale_ * static_cast<float>(options_.backoff_factor), static_cast<float>(options_.min_scale));
}

std::string GradScaler::reason_not_to_fall() const {
  if (options_.rule == ScaleRule::kFixed || overflows_left_ > 1) return "";
  const auto lowest = static_cast<float>(options_.min_scale);
  if (lowest > 0 && scale_ <= lowest) {
    if (options_.at_min_scale == AtMinScale::kStay) return "";
    return c10::str("at its minimum, ", lowest, ": the loss diverges, or min_scale is too high");
  }
  if (fallen() >= std::numeric_limits<float>::min()) return "";
  return c10::str(scale_, ", below which there is none: the gradients are not finite at any scale");
}

void GradScaler::fall(const OptimizerStates& states) {
  good_steps_ = 0;
  std::string overflows;
  for (const auto& [optimizer, state] : states) overflows += state.overflows;
  const auto reason = reason_not_to_fall();
  TORCH_CHECK(reason.empty(), "GradScaler: a gradient overflowed with the loss scale ", reason, overflows);
  if (options_.rule == ScaleRule::kFixed) return;
  if (overflows_left_ > 1)
    --overflows_left_;
  else
    scale_ = fallen();
}

void GradScaler::grow() {
  if (options_.rule == ScaleRule::kFixed) return;
  if (options_.consecutive_hysteresis) overflows_left_ = options_.hysteresis;
  const int64_t uncounted = options_.rule == ScaleRule::kDeepSpeed ? 1 : 0;
  if (++good_steps_ < options_.growth_interval + uncounted) return;
  good_steps_ = uncounted;
  overflows_left_ = options_.hysteresis;
  const float grown = scale_ * static_cast<float>(options_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
}

/// An overflow that only some of the ranks look for would let the scale fall on these alone.
void GradScaler::check_same_ranks(const OptimizerStates& states) {
  const auto& first = states.begin()->second.ranks;
  for (const auto& [optimizer, state] : states) {
    const bool are_alone = first.size() <= 1 && state.ranks.size() <= 1;
    TORCH_CHECK(are_alone || state.ranks == first, "GradScaler: on rank ", internal::rank_for_errors(),
                " the optimizers of this scaler are on ", "different ranks, ", c10::IntArrayRef(first), " and ",
                c10::IntArrayRef(state.ranks), ": set GradScalerOptions::mesh to a mesh of all ranks that have this scaler");
  }
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  const auto states = std::exchange(optimizers_, {});
  has_scaled_ = false;
  if (new_scale) {
    check_scale("the new scale", *new_scale);
    scale_ = static_cast<float>(*new_scale);
    return;
  }
  TORCH_CHECK(!states.empty(), "GradScaler: update() without a step() since the last one");
  check_same_ranks(states);
  const bool overflowed = std::any_of(states.begin(), states.end(), [](const auto& each) { return each.second.overflowed; });
  overflowed ? fall(states) : grow();
}

/// What a load brings back.
class GradScalerBinding final : public StateBinding {
 public:
  GradScalerBinding(GradScaler& scaler, std::string name) : scaler_(scaler), name_(std::move(name)) {}

  void add_entries(StateDict& state) const {
    state.set(name_ + ".scale", static_cast<double>(scaler_.scale_));
    state.set(name_ + ".growth_tracker", scaler_.good_steps_);
    state.set(name_ + ".hysteresis", scaler_.overflows_left_);
  }

  void before_load(StateDict& state, const SavedState& saved) override {
    if (state.contains(name_ + ".scale")) add_entries(state); // they stay where a load may leave them out
    const auto found = saved.values.find(name_ + ".scale");
    const auto* scale = found == saved.values.end() ? nullptr : std::get_if<double>(&found->second);
    if (scale) check_scale("the saved scale", *scale); // else reported as missing
  }

  std::string prefix() const override { return name_ + "."; }

  void after_load(const StateDict& state) override {
    scaler_.scale_ = static_cast<float>(state.value<double>(name_ + ".scale"));
    scaler_.good_steps_ = state.value<int64_t>(name_ + ".growth_tracker");
    scaler_.overflows_left_ = state.value<int64_t>(name_ + ".hysteresis");
    scaler_.optimizers_.clear();
    scaler_.has_scaled_ = false;
  }

 private:
  GradScaler& scaler_;
  const std::string name_;
};

StateDict state_dict(GradScaler& scaler, const std::string& name) {
  TORCH_CHECK_VALUE(!name.empty(), "state dict: the name of a GradScaler is empty");
  auto binding = std::make_shared<GradScalerBinding>(scaler, name);
  StateDict state;
  binding->add_entries(state);
  state.bind(std::move(binding));
  return state;
}

} // namespace tessera
