#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

/// Saves checkpoints in the background, one at a time.
///
/// `save` copies this rank's parts to memory of the host, which is kept for the next save, and returns. A thread writes and
/// commits the checkpoint. Every rank of the job makes one, calls its functions in the same order, and destroys it before
/// `destroy_process_group`. Several (for a model and for its average) may save at the same time; every rank makes and destroys
/// them in the same order. Each needs memory for one copy of this rank's parts.
class Checkpointer {
 public:
  /// With a mesh only its ranks make it and call it, as with SaveOptions::mesh. The mesh in the options of a save must be unset,
  /// or the same.
  explicit Checkpointer(const std::optional<DeviceMesh>& mesh = {});
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// Waits for the save in progress. It cannot throw the error of that save, so call `wait` before.
  ~Checkpointer();

  /// Waits for the last save, and throws its error if it failed. Then copies `state`. When it returns, the tensors may be
  /// changed. Otherwise as `checkpoint::save`.
  void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options = {});
  /// Saves into a storage, which must live until this save has ended.
  void save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options = {});
  /// Returns when the last save is committed; throws its error, once.
  void wait();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera::checkpoint
