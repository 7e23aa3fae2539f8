#pragma once

// Internal: the checkpoints of a training, and its resume.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/training/loop/step/progress.h>
#include <tessera/training/loop/step/train_step.h>

namespace tessera::internal {

enum class CheckpointKind { kRegular, kBest };

/// Saves in the background, one checkpoint at a time. Every rank calls all functions.
class Checkpoints {
 public:
  Checkpoints(const Trained& trained, GradScaler& scaler) : it_(trained), scaler_(scaler) {}

  bool is_enabled() const { return !it_.options.save.folder.empty(); }
  /// Waits for the save before this one and throws its error, copies the state, and returns.
  void save(const Progress& progress, CheckpointKind kind);
  /// Waits for the last save and throws its error. What has become complete since the last call.
  std::vector<SaveEvent> finished();

  struct Resumed {
    std::filesystem::path folder;
    Progress progress;
    std::vector<std::string> differences;
  };
  /// Loads the newest complete checkpoint; nothing where there is none.
  std::optional<Resumed> resume();

 private:
  StateDict state(StateUse use, const Progress& progress) const;
  bool accepts_other_settings() const;
  void take_finished();
  std::string newest() const;

  Trained it_;
  GradScaler& scaler_;
  std::optional<checkpoint::Checkpointer> checkpointer_; ///< from the first save on
  std::optional<SaveEvent> saving_;
  std::vector<SaveEvent> finished_;
};

} // namespace tessera::internal
