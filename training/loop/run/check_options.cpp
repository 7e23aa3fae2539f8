#include <tessera/training/loop/run/check_options.h>

#include <c10/util/Exception.h>

#include <cmath>

namespace tessera::internal {

namespace {

void check_not_negative(const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0, "TrainerOptions::", name, " is ", value, ", but must not be negative");
}

void check_every(const char* name, const Every& every) {
  TORCH_CHECK_VALUE(every.steps >= 0 && every.time.count() >= 0, "TrainerOptions::", name, " is ", every.steps, " steps and ",
                    every.time.count(), " ms, but neither may be negative");
}

void check_save(const SaveOptions& save) {
  check_every("save.every", save.every);
  TORCH_CHECK_VALUE(save.keep == 0 || save.keep >= 2, "TrainerOptions::save.keep is ", save.keep,
                    ", but must be at least 2, as the newest may be unfinished, or 0 for all");
  const bool is_asked = save.every.steps > 0 || save.every.time.count() > 0 || !save.best.empty();
  TORCH_CHECK_VALUE(!save.folder.empty() || !is_asked, "TrainerOptions::save.folder is empty, but checkpoints are asked for");
}

} // namespace

void check_options(const TrainerOptions& options) {
  TORCH_CHECK_VALUE(options.micro_batches >= 1, "TrainerOptions::micro_batches is ", options.micro_batches,
                    ", but must be at least 1");
  check_not_negative("max_grad_norm", options.max_grad_norm);
  check_not_negative("stop_after.steps", static_cast<double>(options.stop_after.steps));
  check_not_negative("stop_after.epochs", static_cast<double>(options.stop_after.epochs));
  check_not_negative("stop_after.run_time", static_cast<double>(options.stop_after.run_time.count()));
  check_not_negative("log.every", static_cast<double>(options.log.every));
  check_not_negative("flops.a_row", options.flops.a_row);
  check_not_negative("flops.peak_of_a_rank", options.flops.peak_of_a_rank);
  check_every("evaluate", options.evaluate);
  check_save(options.save);
  if (!options.profile.folder.empty()) {
    TORCH_CHECK_VALUE(options.profile.first_step >= 0 && options.profile.steps >= 1, "TrainerOptions::profile has ",
                      options.profile.steps, " steps from step ", options.profile.first_step,
                      " on, but needs at least one, and counts from 0");
  }
  if (!options.early_stop) return;
  const auto& stop = *options.early_stop;
  TORCH_CHECK_VALUE(!stop.metric.empty(), "TrainerOptions::early_stop.metric is empty");
  TORCH_CHECK_VALUE(stop.patience >= 1, "TrainerOptions::early_stop.patience is ", stop.patience, ", but must be at least 1");
  TORCH_CHECK_VALUE(stop.min_change >= 0 && std::isfinite(stop.min_change), "TrainerOptions::early_stop.min_change is ",
                    stop.min_change, ", but must be finite and not negative");
}

} // namespace tessera::internal
