#include <tessera/training/loop/run/checkpoints.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <utility>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/communication_state.h>
#include <tessera/collectives/process_context.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/loop/run/progress_state.h>
#include <tessera/training/lr_schedule.h>

namespace tessera::internal {

namespace {

/// What saves and loads take for it: all ranks of the job need no mesh.
std::optional<DeviceMesh> saving_ranks(const Agreement& agreement) {
  return agreement.size() == process_context().world_size() ? std::nullopt : std::optional(agreement.mesh());
}

std::string schedule_name(size_t index) { return index == 0 ? "lr_schedule" : fmt::format("lr_schedule_{}", index); }

} // namespace

bool Checkpoints::accepts_other_settings() const { return it_.options.save.other_settings == OtherSettings::kAccept; }

StateDict Checkpoints::state(StateUse use, const Progress& progress) const {
  auto state = it_.hooks.state ? it_.hooks.state(use) : state_dict(it_.module, it_.optimizer);
  for (size_t i = 0; i < it_.hooks.schedules.size(); ++i)
    state.merge(state_dict(*it_.hooks.schedules[i], {.name = schedule_name(i)}));
  for (const auto* average : it_.hooks.averages) state.merge(state_dict(*average));
  if (scaler_.is_enabled()) state.merge(state_dict(scaler_));
  if (use == StateUse::kSave || !accepts_other_settings()) state.merge(communication_state(it_.module));
  for (const auto& kept : it_.hooks.kept) state.merge(kept.make());
  state.merge(state_of(progress, it_.options.seed, it_.options.config));
  return state;
}

void Checkpoints::take_finished() {
  if (!saving_) return;
  const auto event = *std::exchange(saving_, std::nullopt);
  checkpointer_->wait();
  finished_.push_back(event);
}

std::vector<SaveEvent> Checkpoints::finished() {
  take_finished();
  return std::exchange(finished_, {});
}

void Checkpoints::save(const Progress& progress, CheckpointKind kind) {
  StateDict state;
  it_.agreement.run("the state for a checkpoint", [&] { state = this->state(StateUse::kSave, progress); });
  it_.agreement.check();
  take_finished();
  if (!checkpointer_) checkpointer_.emplace(saving_ranks(it_.agreement));
  const bool is_best = kind == CheckpointKind::kBest;
  const auto& options = it_.options.save;
  const auto folder = std::filesystem::path(options.folder) / (is_best ? "best" : fmt::format("step-{:06}", progress.steps));
  checkpointer_->save(state, folder,
                      {.overwrite = true, .update_latest = !is_best, .keep_last = is_best ? 0 : static_cast<int>(options.keep)});
  saving_ = SaveEvent{.folder = folder, .step = progress.steps, .is_best = is_best};
}

/// The first rank's: others may see the folder a moment later.
std::string Checkpoints::newest() const {
  std::string folder;
  it_.agreement.run("the checkpoints in " + it_.options.save.folder, [&] {
    if (it_.agreement.is_first()) folder = checkpoint::latest(it_.options.save.folder).string();
  });
  it_.agreement.check();
  return it_.agreement.texts(folder).front();
}

std::optional<Checkpoints::Resumed> Checkpoints::resume() {
  if (!is_enabled()) return std::nullopt;
  Resumed resumed{.folder = newest(), .progress = {}, .differences = {}};
  if (resumed.folder.empty()) return std::nullopt;
  TORCH_CHECK(it_.options.save.resume != Resume::kNever, "Trainer: TrainerOptions::save.folder holds the checkpoint ",
              resumed.folder.string(), " already: a new training needs another folder, or Resume::kIfThere to go on from it");
  StateDict state;
  it_.agreement.run("the state for a resume", [&] { state = this->state(StateUse::kLoad, {}); });
  it_.agreement.check();
  checkpoint::LoadOptions options{.mesh = saving_ranks(it_.agreement)};
  if (accepts_other_settings()) options.filter = [](const std::string& name) { return !name.starts_with("communication."); };
  checkpoint::load(state, resumed.folder, options);
  resumed.progress = progress_in(state);
  resumed.differences = config_differences(config_in(state), it_.options.config);
  if (const auto seed = seed_in(state); seed != it_.options.seed)
    resumed.differences.push_back(fmt::format("TrainerOptions::seed: saved {}, here {}", seed, it_.options.seed));
  TORCH_CHECK(seed_in(state) == it_.options.seed || accepts_other_settings(), "Trainer: the checkpoint ", resumed.folder.string(),
              " was trained with another seed: ", resumed.differences.back(),
              ". Take that one, or accept other settings with SaveOptions::other_settings");
  for (const auto& kept : it_.hooks.kept) {
    if (kept.loaded) it_.agreement.run("what loads the state of \"" + kept.name + '"', [&] { kept.loaded(state); });
  }
  it_.agreement.check();
  return resumed;
}

} // namespace tessera::internal
