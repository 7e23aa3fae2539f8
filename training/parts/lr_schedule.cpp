#include <tessera/training/lr_schedule.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <utility>

namespace tessera {

namespace {

void check_steps(const char* type, const char* name, int64_t steps, int64_t least = 0) {
  TORCH_CHECK_VALUE(steps >= least, type, ": ", name, " is ", steps, ", and must be at least ", least);
}

void check_ratio(const char* type, const char* name, double ratio) {
  TORCH_CHECK_VALUE(std::isfinite(ratio) && ratio >= 0, type, ": ", name, " is ", ratio, ", and must be finite and not negative");
}

double between(double from, double to, double part) { return from + (to - from) * part; }

double part_of(int64_t steps, int64_t of) { return static_cast<double>(steps) / static_cast<double>(of); }

double half_cosine(double part) { return 0.5 * (1 + std::cos(std::numbers::pi * part)); }

LRSchedule::Settings settings_of(const char* type, const WarmupOptions& options) {
  check_steps(type, "total_steps", options.total_steps, 1);
  check_steps(type, "warmup_steps", options.warmup_steps);
  TORCH_CHECK_VALUE(options.warmup_steps <= options.total_steps, type, ": warmup_steps is ", options.warmup_steps,
                    ", more than total_steps, ", options.total_steps);
  check_ratio(type, "start_ratio", options.start_ratio);
  check_ratio(type, "end_ratio", options.end_ratio);
  return {{"warmup_steps", options.warmup_steps},
          {"total_steps", options.total_steps},
          {"start_ratio", options.start_ratio},
          {"end_ratio", options.end_ratio}};
}

/// `fall` goes from 1 to 0 while its argument goes from 0 to 1.
LRSchedule::Formula warmup_and(const WarmupOptions& options, double (*fall)(double)) {
  return [options, fall](double base_lr, int64_t step) {
    if (step < options.warmup_steps) return base_lr * between(options.start_ratio, 1, part_of(step, options.warmup_steps));
    if (step >= options.total_steps) return base_lr * options.end_ratio;
    return base_lr *
           between(options.end_ratio, 1, fall(part_of(step - options.warmup_steps, options.total_steps - options.warmup_steps)));
  };
}

double fall_of(DecayShape shape, double part) {
  switch (shape) {
    case DecayShape::kCosine: return half_cosine(part);
    case DecayShape::kLinear: return 1 - part;
    case DecayShape::kOneMinusSqrt: break;
  }
  return 1 - std::sqrt(part);
}

LRSchedule::Settings settings_of(const WSDOptions& options) {
  constexpr const char* kType = "WSDLR";
  check_steps(kType, "warmup_steps", options.warmup_steps);
  check_steps(kType, "stable_steps", options.stable_steps);
  check_steps(kType, "decay_steps", options.decay_steps, 1);
  check_ratio(kType, "start_ratio", options.start_ratio);
  check_ratio(kType, "end_ratio", options.end_ratio);
  return {{"warmup_steps", options.warmup_steps}, {"stable_steps", options.stable_steps}, {"decay_steps", options.decay_steps},
          {"start_ratio", options.start_ratio},   {"end_ratio", options.end_ratio},       {"decay", int64_t(options.decay)}};
}

double wsd_lr(const WSDOptions& options, double base_lr, int64_t step) {
  if (step < options.warmup_steps) return base_lr * between(options.start_ratio, 1, part_of(step, options.warmup_steps));
  const auto decayed = step - options.warmup_steps - options.stable_steps;
  if (decayed < 0) return base_lr;
  if (decayed >= options.decay_steps) return base_lr * options.end_ratio;
  return base_lr * between(options.end_ratio, 1, fall_of(options.decay, part_of(decayed, options.decay_steps)));
}

// DeepSpeed's, whose numbers these are to the bit: so the operations are in its order.

constexpr int64_t kLeastWarmup = 2; // its logarithm divides

void check_warmup(const char* type, int64_t warmup, std::optional<int64_t> total) {
  check_steps(type, "warmup_num_steps", warmup, 1);
  if (!total) return;
  check_steps(type, "total_num_steps", *total, 1);
  TORCH_CHECK_VALUE(warmup <= *total, type, ": warmup_num_steps is ", warmup, ", more than total_num_steps, ", *total);
}

/// Goes from 0 to 1 in the first `warmup` iterations.
double warmup_part(WarmupShape shape, int64_t iteration, int64_t warmup) {
  if (shape == WarmupShape::kLinear) return part_of(iteration, warmup);
  const double inverse = 1.0 / std::log(static_cast<double>(warmup));
  return inverse * std::log(static_cast<double>(iteration + 1));
}

LRSchedule::Settings settings_of(const WarmupLROptions& options) {
  constexpr const char* kType = "WarmupLR";
  check_warmup(kType, options.warmup_num_steps, std::nullopt);
  check_ratio(kType, "warmup_min_lr", options.warmup_min_lr);
  LRSchedule::Settings settings{{"warmup_min_lr", options.warmup_min_lr},
                                {"warmup_num_steps", options.warmup_num_steps},
                                {"linear_warmup", options.warmup_type == WarmupShape::kLinear}};
  if (options.warmup_max_lr) {
    check_ratio(kType, "warmup_max_lr", *options.warmup_max_lr);
    settings.emplace("warmup_max_lr", *options.warmup_max_lr);
  }
  return settings;
}

double warmup_lr(const WarmupLROptions& options, double base_lr, int64_t step) {
  const auto warmup = std::max(options.warmup_num_steps, kLeastWarmup), iteration = std::max<int64_t>(step - 1, 0);
  const double part = iteration < warmup ? warmup_part(options.warmup_type, iteration, warmup) : 1;
  return between(options.warmup_min_lr, options.warmup_max_lr.value_or(base_lr), part);
}

LRSchedule::Settings settings_of(const WarmupDecayOptions& options) {
  constexpr const char* kType = "WarmupDecayLR";
  check_warmup(kType, options.warmup_num_steps, options.total_num_steps);
  check_ratio(kType, "warmup_min_lr", options.warmup_min_lr);
  check_ratio(kType, "warmup_max_lr", options.warmup_max_lr);
  return {{"total_num_steps", options.total_num_steps},
          {"warmup_min_lr", options.warmup_min_lr},
          {"warmup_max_lr", options.warmup_max_lr},
          {"warmup_num_steps", options.warmup_num_steps},
          {"linear_warmup", options.warmup_type == WarmupShape::kLinear}};
}

double warmup_decay_lr(const WarmupDecayOptions& options, int64_t step) {
  const auto warmup = std::max(options.warmup_num_steps, kLeastWarmup), total = options.total_num_steps,
             iteration = std::max<int64_t>(step - 1, 0);
  const double part = iteration < warmup ? warmup_part(options.warmup_type, iteration, warmup)
                                         : std::max(0.0, part_of(total - iteration, std::max<int64_t>(total - warmup, 1)));
  return between(options.warmup_min_lr, options.warmup_max_lr, part);
}

LRSchedule::Settings settings_of(const WarmupCosineRatioOptions& options) {
  constexpr const char* kType = "WarmupCosineRatioLR";
  check_warmup(kType, options.warmup_num_steps, options.total_num_steps);
  check_ratio(kType, "warmup_min_ratio", options.warmup_min_ratio);
  check_ratio(kType, "cos_min_ratio", options.cos_min_ratio);
  return {{"total_num_steps", options.total_num_steps},
          {"warmup_min_ratio", options.warmup_min_ratio},
          {"warmup_num_steps", options.warmup_num_steps},
          {"cos_min_ratio", options.cos_min_ratio},
          {"linear_warmup", options.warmup_type == WarmupShape::kLinear}};
}

double warmup_cosine_lr(const WarmupCosineRatioOptions& options, double base_lr, int64_t step) {
  const auto warmup = std::max(options.warmup_num_steps, kLeastWarmup), iteration = step - 1;
  if (iteration < 0) return 0;
  if (iteration < warmup)
    return base_lr * between(options.warmup_min_ratio, 1, warmup_part(options.warmup_type, iteration, warmup));
  const auto decay = std::max<int64_t>(1, options.total_num_steps - warmup);
  const double progress = std::min(1.0, part_of(iteration - warmup + 1, decay));
  const double fall = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return base_lr * std::max(0.0, between(options.cos_min_ratio, 1, fall));
}

} // namespace

LRSchedule::LRSchedule(torch::optim::Optimizer& optimizer, std::string type, Settings settings, Formula formula, Rates rates)
    : LRScheduler(optimizer),
      optimizer_(&optimizer),
      type_(std::move(type)),
      settings_(std::move(settings)),
      formula_(std::move(formula)),
      base_lrs_(get_current_lrs()),
      rates_(rates) {
  TORCH_CHECK_VALUE(formula_, type_, ": the formula is empty");
  const bool any = std::any_of(base_lrs_.begin(), base_lrs_.end(), [](double lr) { return lr != 0; });
  TORCH_CHECK_VALUE(any || rates_ == Rates::kAbsolute, type_,
                    ": the optimizer's lr is 0 in every parameter group. Where another schedule set it, as one with "
                    "warm-up does at once, set the base rate again before this one is made");
  apply();
}

void LRSchedule::check_groups() const {
  TORCH_CHECK(optimizer_->param_groups().size() == base_lrs_.size(), type_, ": the optimizer has ",
              optimizer_->param_groups().size(), " parameter groups, and had ", base_lrs_.size(),
              " when the schedule was made. After add_param_group set the base lr of every group, make a new schedule, and give "
              "it the old one's steps_taken with set_steps_taken");
}

std::vector<double> LRSchedule::get_lrs() {
  check_groups();
  return lrs_at(steps_taken() + 1);
}

std::vector<double> LRSchedule::lrs_at(int64_t step) const {
  std::vector<double> lrs;
  for (const auto base_lr : base_lrs_) lrs.push_back(formula_(base_lr, step));
  return lrs;
}

void LRSchedule::apply() const {
  check_groups();
  const auto lrs = this->lrs();
  auto& groups = optimizer_->param_groups();
  for (size_t i = 0; i < lrs.size(); ++i) groups[i].options().set_lr(lrs[i]);
}

void LRSchedule::set_steps_taken(int64_t steps) {
  TORCH_CHECK_VALUE(steps >= 0 && steps <= std::numeric_limits<unsigned>::max(), type_, ": no schedule has taken ", steps,
                    " steps");
  step_count_ = static_cast<unsigned>(steps);
  apply();
}

WarmupCosineLR::WarmupCosineLR(torch::optim::Optimizer& optimizer, const WarmupOptions& options)
    : LRSchedule(optimizer, "WarmupCosineLR", settings_of("WarmupCosineLR", options), warmup_and(options, half_cosine)) {}

WarmupLinearLR::WarmupLinearLR(torch::optim::Optimizer& optimizer, const WarmupOptions& options)
    : LRSchedule(optimizer, "WarmupLinearLR", settings_of("WarmupLinearLR", options),
                 warmup_and(options, [](double part) { return 1 - part; })) {}

WSDLR::WSDLR(torch::optim::Optimizer& optimizer, const WSDOptions& options)
    : LRSchedule(optimizer, "WSDLR", settings_of(options),
                 [options](double base_lr, int64_t step) { return wsd_lr(options, base_lr, step); }) {}

WarmupLR::WarmupLR(torch::optim::Optimizer& optimizer, const WarmupLROptions& options)
    : LRSchedule(
          optimizer, "WarmupLR", settings_of(options),
          [options](double base_lr, int64_t step) { return warmup_lr(options, base_lr, step); },
          options.warmup_max_lr ? Rates::kAbsolute : Rates::kOfBase) {}

WarmupDecayLR::WarmupDecayLR(torch::optim::Optimizer& optimizer, const WarmupDecayOptions& options)
    : LRSchedule(
          optimizer, "WarmupDecayLR", settings_of(options),
          [options](double, int64_t step) { return warmup_decay_lr(options, step); }, Rates::kAbsolute) {}

WarmupCosineRatioLR::WarmupCosineRatioLR(torch::optim::Optimizer& optimizer, const WarmupCosineRatioOptions& options)
    : LRSchedule(optimizer, "WarmupCosineRatioLR", settings_of(options),
                 [options](double base_lr, int64_t step) { return warmup_cosine_lr(options, base_lr, step); }) {}

} // namespace tessera
