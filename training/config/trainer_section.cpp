// What the Trainer takes of a config.
#include <c10/util/Exception.h>

#include <tessera/training/config/sections.h>
#include <tessera/training/config/values/when.h>

namespace tessera::internal {

namespace {

Better better_of(const ConfigValues& values, const std::string& key) {
  return values.text(key) == "smaller" ? Better::kSmaller : Better::kLarger;
}

SaveOptions save_of(const ConfigValues& values) {
  SaveOptions save{.folder = values.text("tessera.save.folder"),
                   .every = every_of(values.texts("tessera.save.every"), values.where("tessera.save.every")),
                   .keep = values.integer("tessera.save.keep"),
                   .best = values.text("tessera.save.best"),
                   .better = better_of(values, "tessera.save.better")};
  if (values.text("tessera.save.resume") == "never") save.resume = Resume::kNever;
  if (values.text("tessera.save.other_settings") == "accept") save.other_settings = OtherSettings::kAccept;
  TORCH_CHECK_VALUE(!values.has("tessera.save") || !save.folder.empty(), values.where("tessera.save.folder"), " is not given");
  TORCH_CHECK_VALUE(save.keep == 0 || save.keep >= 2, values.where("tessera.save.keep"), " is ", save.keep,
                    ", but must be 0, which keeps all, or at least 2: the newest may be unfinished");
  return save;
}

/// The folder of one of DeepSpeed's monitors; empty where it is off.
std::string monitor_of(const ConfigValues& values, const std::string& block) {
  if (!values.boolean(block + ".enabled")) return "";
  const auto path = values.text(block + ".output_path"), job = values.text(block + ".job_name");
  return path.empty() ? job : path + (path.ends_with('/') ? "" : "/") + job;
}

std::string folder_of_log(const ConfigValues& values, const std::string& key, const std::string& monitor) {
  const auto own = values.text(key), theirs = monitor_of(values, monitor);
  TORCH_CHECK_VALUE(own.empty() || theirs.empty(), values.where(key), " and ", monitor, " are both given");
  return own.empty() ? theirs : own;
}

LogOptions log_of(const ConfigValues& values) {
  const auto own = values.optional_integer("tessera.log.every"), theirs = values.optional_integer("steps_per_print");
  const auto every = own ? *own : theirs.value_or(1);
  TORCH_CHECK_VALUE(every >= 1, values.where(own ? "tessera.log.every" : "steps_per_print"), " is ", every,
                    ", but must be positive");
  return {.jsonl = values.text("tessera.log.jsonl"),
          .tensorboard = folder_of_log(values, "tessera.log.tensorboard", "tensorboard"),
          .csv = folder_of_log(values, "tessera.log.csv", "csv_monitor"),
          .every = every,
          .breakdown = values.boolean("wall_clock_breakdown"),
          .progress = values.boolean("tessera.log.progress")};
}

std::optional<EarlyStop> early_stop_of(const ConfigValues& values) {
  if (!values.has("tessera.early_stop")) return std::nullopt;
  const auto metric = values.optional_text("tessera.early_stop.metric");
  TORCH_CHECK_VALUE(metric, values.where("tessera.early_stop.metric"), " is not given");
  EarlyStop stop{.metric = *metric,
                 .patience = values.integer("tessera.early_stop.patience"),
                 .min_change = values.number("tessera.early_stop.min_change"),
                 .better = better_of(values, "tessera.early_stop.better")};
  TORCH_CHECK_VALUE(stop.patience >= 1, values.where("tessera.early_stop.patience"), " is ", stop.patience,
                    ", but must be positive");
  return stop;
}

ProfileOptions profile_of(const ConfigValues& values) {
  ProfileOptions profile{.folder = values.text("tessera.profile.folder"),
                         .first_step = values.integer("tessera.profile.first_step"),
                         .steps = values.integer("tessera.profile.steps")};
  TORCH_CHECK_VALUE(!values.has("tessera.profile") || !profile.folder.empty(), values.where("tessera.profile.folder"),
                    " is not given");
  TORCH_CHECK_VALUE(profile.first_step >= 0, values.where("tessera.profile.first_step"), " is ", profile.first_step,
                    ", but must not be negative");
  TORCH_CHECK_VALUE(profile.steps >= 1, values.where("tessera.profile.steps"), " is ", profile.steps, ", but must be positive");
  return profile;
}

FlopsOptions flops_of(const ConfigValues& values) {
  const FlopsOptions flops{.a_row = values.number("tessera.flops.a_row"),
                           .peak_of_a_rank = values.number("tessera.flops.peak_of_a_rank")};
  TORCH_CHECK_VALUE(flops.a_row >= 0, values.where("tessera.flops.a_row"), " is ", flops.a_row, ", but must not be negative");
  TORCH_CHECK_VALUE(flops.peak_of_a_rank >= 0, values.where("tessera.flops.peak_of_a_rank"), " is ", flops.peak_of_a_rank,
                    ", but must not be negative");
  return flops;
}

NonFinite non_finite_of(const ConfigValues& values) {
  if (const auto own = values.optional_text("tessera.non_finite")) return *own == "skip" ? NonFinite::kSkip : NonFinite::kError;
  const bool skips = values.boolean("bf16.enabled") && values.boolean("bf16.check_grad_overflow");
  return skips ? NonFinite::kSkip : NonFinite::kError;
}

double max_norm_of(ConfigValues& values) {
  if (!values.has("gradient_clipping"))
    values.notes().emplace_back("gradient_clipping is not given, and 1.0 as in DeepSpeed since 0.19.3; earlier ones do not clip");
  const auto norm = values.number("gradient_clipping");
  TORCH_CHECK_VALUE(norm >= 0, values.where("gradient_clipping"), " is ", norm, ", but must not be negative; 0: off");
  return norm;
}

} // namespace

TrainerOptions trainer_options_of(ConfigValues& values, const BatchConfig& batch) {
  TrainerOptions options;
  options.micro_batches = batch.accumulation;
  options.max_grad_norm = max_norm_of(values);
  options.scaler = scaler_of(values);
  options.non_finite = non_finite_of(values);
  options.seed = static_cast<uint64_t>(values.integer("tessera.seed"));
  options.stop_after = stop_after_of(values.texts("tessera.stop_after"), values.where("tessera.stop_after"));
  options.save = save_of(values);
  options.evaluate = every_of(values.texts("tessera.evaluate.every"), values.where("tessera.evaluate.every"));
  options.log = log_of(values);
  options.early_stop = early_stop_of(values);
  options.profile = profile_of(values);
  options.flops = flops_of(values);
  return options;
}

} // namespace tessera::internal
