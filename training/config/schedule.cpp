// The learning-rate schedule of a config.
#include <c10/util/Exception.h>

#include <algorithm>

#include <tessera/training/config/sections.h>
#include <tessera/training/config/values/when.h>

namespace tessera::internal {

namespace {

constexpr auto* kParams = "scheduler.params.";

WarmupShape warmup_shape_of(const ConfigValues& values) {
  return values.text("scheduler.params.warmup_type") == "linear" ? WarmupShape::kLinear : WarmupShape::kLog;
}

/// The steps of the warm-up: an error that names what an "auto" made 0.
int64_t warmup_steps_of(const ConfigValues& values) {
  constexpr auto* kKey = "scheduler.params.warmup_num_steps";
  const auto steps = values.integer(kKey);
  TORCH_CHECK_VALUE(steps >= 1, values.where(kKey), " is ", steps,
                    ", but must be positive; a schedule without warm-up is tessera.schedule");
  return steps;
}

int64_t total_steps_of(const ConfigValues& values) {
  constexpr auto* kKey = "scheduler.params.total_num_steps";
  const auto steps = values.optional_integer(kKey);
  TORCH_CHECK_VALUE(steps && *steps >= 1, values.where(kKey), steps ? " is " : " is not given",
                    steps ? std::to_string(*steps) : "", ", but the schedule needs the steps of the training");
  TORCH_CHECK_VALUE(warmup_steps_of(values) <= *steps, values.where("scheduler.params.warmup_num_steps"), " is ",
                    warmup_steps_of(values), ", more than total_num_steps, ", *steps);
  return *steps;
}

ScheduleConfig warmup(const ConfigValues& values) {
  return WarmupLROptions{.warmup_min_lr = values.number("scheduler.params.warmup_min_lr"),
                         .warmup_max_lr = values.optional_number("scheduler.params.warmup_max_lr"),
                         .warmup_num_steps = warmup_steps_of(values),
                         .warmup_type = warmup_shape_of(values)};
}

ScheduleConfig warmup_decay(const ConfigValues& values) {
  WarmupDecayOptions options{.total_num_steps = total_steps_of(values),
                             .warmup_min_lr = values.number("scheduler.params.warmup_min_lr"),
                             .warmup_num_steps = warmup_steps_of(values),
                             .warmup_type = warmup_shape_of(values)};
  options.warmup_max_lr = values.optional_number("scheduler.params.warmup_max_lr").value_or(options.warmup_max_lr);
  return options;
}

ScheduleConfig warmup_cosine(const ConfigValues& values) {
  return WarmupCosineRatioOptions{.total_num_steps = total_steps_of(values),
                                  .warmup_min_ratio = values.number("scheduler.params.warmup_min_ratio"),
                                  .warmup_num_steps = warmup_steps_of(values),
                                  .cos_min_ratio = values.number("scheduler.params.cos_min_ratio"),
                                  .warmup_type = warmup_shape_of(values)};
}

struct ScheduleRow {
  const char* name;
  ScheduleConfig (*make)(const ConfigValues&);
  std::vector<std::string> params;
};

const std::vector<ScheduleRow>& schedule_rows() {
  static const std::vector<ScheduleRow> rows{
      {"WarmupLR", warmup, {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"}},
      {"WarmupDecayLR",
       warmup_decay,
       {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "last_batch_iteration"}},
      {"WarmupCosineLR",
       warmup_cosine,
       {"warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps", "last_batch_iteration"}}};
  return rows;
}

ScheduleConfig schedule_of_deepspeed(const ConfigValues& values) {
  constexpr auto* kType = "scheduler.type";
  const auto type = values.optional_text(kType);
  TORCH_CHECK_VALUE(type, values.where(kType), " is not given");
  std::vector<std::string> names;
  for (const auto& row : schedule_rows()) {
    names.emplace_back(row.name);
    if (*type != row.name) continue;
    for (const auto& [key, value] : values.given()) {
      if (!key.starts_with(kParams)) continue;
      const auto name = key.substr(std::string(kParams).size());
      const bool is_known = std::find(row.params.begin(), row.params.end(), name) != row.params.end();
      TORCH_CHECK_VALUE(is_known, values.where(key), " is no parameter of ", row.name, nearest_name(name, row.params));
    }
    return row.make(values);
  }
  TORCH_CHECK_VALUE(false, values.where(kType), " is ", *type, ", which is no schedule here", nearest_name(*type, names),
                    " There are WarmupLR, WarmupDecayLR and WarmupCosineLR");
}

ScheduleConfig schedule_of_tessera(const ConfigValues& values) {
  const auto type = values.optional_text("tessera.schedule.type");
  TORCH_CHECK_VALUE(type, values.where("tessera.schedule.type"), " is not given");
  const auto stop = stop_after_of(values.texts("tessera.stop_after"), values.where("tessera.stop_after")).steps;
  const auto total = values.optional_integer("tessera.schedule.total_steps").value_or(stop);
  TORCH_CHECK_VALUE(total >= 1, values.where("tessera.schedule.total_steps"),
                    " is not given, and tessera.stop_after has no number of steps");
  const auto warmup = values.integer("tessera.schedule.warmup_steps");
  const auto start = values.number("tessera.schedule.start_ratio"), end = values.number("tessera.schedule.end_ratio");
  TORCH_CHECK_VALUE(warmup >= 0 && warmup <= total, values.where("tessera.schedule.warmup_steps"), " is ", warmup,
                    ", but must be from 0 to total_steps, ", total);
  const WarmupOptions options{.warmup_steps = warmup, .total_steps = total, .start_ratio = start, .end_ratio = end};
  const auto decay = values.optional_integer("tessera.schedule.decay_steps");
  TORCH_CHECK_VALUE(!decay || *type == "wsd", values.where("tessera.schedule.decay_steps"), " is for wsd, but the type is ",
                    *type);
  if (*type == "linear") return LinearSchedule{options};
  if (*type == "cosine") return CosineSchedule{options};
  TORCH_CHECK_VALUE(decay && *decay >= 1 && warmup + *decay <= total, values.where("tessera.schedule.decay_steps"),
                    decay ? " is " + std::to_string(*decay) : " is not given", ", but must be from 1 to ", total - warmup);
  return WSDOptions{.warmup_steps = warmup,
                    .stable_steps = total - warmup - *decay,
                    .decay_steps = *decay,
                    .start_ratio = start,
                    .end_ratio = end};
}

} // namespace

ScheduleConfig schedule_of(const ConfigValues& values) {
  const bool theirs = values.has("scheduler"), ours = values.has("tessera.schedule");
  TORCH_CHECK_VALUE(!theirs || !ours, values.source(), ": scheduler and tessera.schedule are both given");
  if (theirs) return schedule_of_deepspeed(values);
  return ours ? schedule_of_tessera(values) : ScheduleConfig();
}

} // namespace tessera::internal
