#pragma once

// Internal: the folder in which a checkpoint is written before it gets its name.

#include <filesystem>
#include <string>

namespace tessera::checkpoint {

/// ".<name>.<purpose>-<pid>-<number>" beside `path`: a name of this process that no checkpoint has.
std::filesystem::path hidden_name(const std::filesystem::path& path, const std::string& purpose);

/// A folder ".<name>.saving-<pid>-<number>" beside the target `<name>`, owned by the process that made it (rank 0).
///
/// The owner holds a lock on it, so that a later save can tell a folder that is being written from one that a killed job left
/// behind, and removes the latter. The destructor removes the folder unless it was committed.
class Staging {
 public:
  /// Makes the folder, and the parent folders of `target`. Errors: a name that checkpoints may not have (`latest`, or hidden), an
  /// existing target unless `overwrite`, and one that holds more than a checkpoint.
  Staging(const std::filesystem::path& target, bool overwrite);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  /// Absolute, without a trailing separator.
  const std::filesystem::path& target() const { return target_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// Flushes the folder and gives it the target's name.
  void commit();

 private:
  void make_folder();

  std::filesystem::path target_, folder_;
  bool overwrite_;
  int lock_ = -1;
  bool committed_ = false;
};

} // namespace tessera::checkpoint
