#pragma once

#include <filesystem>
#include <memory>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

/// Saves checkpoints in the background, one at a time.
///
/// `save` copies this rank's parts to memory of the host, which the checkpointer keeps for the next one, and returns; a thread
/// writes and commits the checkpoint. Every rank of the job makes one, calls its functions in the same order, and lets it go
/// before `destroy_process_group`. Several (of a model and of its average) save beside each other; every rank makes them, and
/// lets them go, in the same order. Each needs memory for one copy of this rank's parts.
class Checkpointer {
 public:
  Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// Waits for the save in progress; its error is lost, so call `wait` before.
  ~Checkpointer();

  /// Waits for the save before, and throws its error if it failed; then copies `state`. When it returns, the tensors may be
  /// changed. Otherwise as `checkpoint::save`.
  void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options = {});
  /// Returns when the last save is committed; throws its error, once.
  void wait();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera::checkpoint
