#pragma once

#include <filesystem>
#include <memory>
#include <optional>

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
  /// With a mesh its ranks alone make it and call it, as with SaveOptions::mesh; that of a save's options must be unset, or the
  /// same.
  explicit Checkpointer(const std::optional<DeviceMesh>& mesh = {});
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// Waits for the save in progress; its error is lost, so call `wait` before.
  ~Checkpointer();

  /// Waits for the save before, and throws its error if it failed; then copies `state`. When it returns, the tensors may be
  /// changed. Otherwise as `checkpoint::save`.
  void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options = {});
  /// The same into a storage, which must live until this save has ended.
  void save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options = {});
  /// Returns when the last save is committed; throws its error, once.
  void wait();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera::checkpoint
