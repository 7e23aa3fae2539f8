#include <tessera/training/lr_schedule.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
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

LRSchedule::Settings settings_of(const WarmupDecayOptions& options) {
  constexpr const char* kType = "WarmupDecayLR";
  check_steps(kType, "total_num_steps", options.total_num_steps, 1);
  check_steps(kType, "warmup_num_steps", options.warmup_num_steps, 2);
  TORCH_CHECK_VALUE(options.warmup_num_steps <= options.total_num_steps, kType, ": warmup_num_steps is ",
                    options.warmup_num_steps, ", more than total_num_steps, ", options.total_num_steps);
  check_ratio(kType, "warmup_min_lr", options.warmup_min_lr);
  check_ratio(kType, "warmup_max_lr", options.warmup_max_lr);
  return {{"total_num_steps", options.total_num_steps},
          {"warmup_min_lr", options.warmup_min_lr},
          {"warmup_max_lr", options.warmup_max_lr},
          {"warmup_num_steps", options.warmup_num_steps},
          {"linear_warmup", options.linear_warmup}};
}

double warmup_decay_lr(const WarmupDecayOptions& options, int64_t step) {
  const auto warmup = options.warmup_num_steps, total = options.total_num_steps, iteration = std::max<int64_t>(step - 1, 0);
  double part = 0;
  if (iteration >= warmup) {
    part = std::max(0.0, part_of(total - iteration, std::max<int64_t>(total - warmup, 1)));
  } else if (options.linear_warmup) {
    part = part_of(iteration, warmup);
  } else {
    part = std::log(static_cast<double>(iteration + 1)) / std::log(static_cast<double>(warmup));
  }
  return between(options.warmup_min_lr, options.warmup_max_lr, part);
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

WarmupDecayLR::WarmupDecayLR(torch::optim::Optimizer& optimizer, const WarmupDecayOptions& options)
    : LRSchedule(
          optimizer, "WarmupDecayLR", settings_of(options),
          [options](double, int64_t step) { return warmup_decay_lr(options, step); }, Rates::kAbsolute) {}

} // namespace tessera
