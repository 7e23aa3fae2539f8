#pragma once

// Internal: the folder in which a checkpoint is written before it gets its name.

#include <filesystem>
#include <string>

namespace tessera::internal {

/// What gets the target's name.
struct Staged {
  enum Kind {
    kFolder,  ///< the folder
    kWeights, ///< the folder; what lies beside the weights of one that is there, such as a configuration, stays
    kFile,    ///< the file in it that already has that name
  };
  Kind kind = kFolder;
  std::string file_name = {}; ///< of weights
};

/// A folder ".<name>.saving-<pid>-<number>" beside the target `<name>`, owned by the process that made it (rank 0).
///
/// The owner holds a lock on it, so that a later save can tell a folder that is being written from one that a killed job left
/// behind, and removes the latter. The destructor removes the folder unless it was committed.
class Staging {
 public:
  /// Makes the folder, and the parent folders of `target`. Errors: a name that checkpoints may not have (`latest`, or hidden), an
  /// existing target unless `overwrite`, and one that holds more than a checkpoint, or is no file where a file is staged. Where
  /// weights are staged, a folder without any of their name is no such target. A folder that is a mount point, or the current
  /// one, is not replaced either.
  Staging(const std::filesystem::path& target, bool overwrite, Staged staged = {});
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  /// Absolute, without a trailing separator, and the folder above it without symbolic links.
  const std::filesystem::path& target() const { return target_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// Flushes the folder and gives it, or the file in it, the target's name. A folder that replaces another takes its permissions.
  void commit();

 private:
  void check_target() const;
  void make_folder();

  std::filesystem::path target_, folder_;
  bool overwrite_;
  Staged staged_;
  int lock_ = -1;
  bool committed_ = false;
};

} // namespace tessera::internal
