#pragma once

// Internal: records steps of a training.

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/training/trainer_options.h>

namespace tessera::internal {

/// Records the steps of `ProfileOptions` and writes them. All functions are local.
class ProfileWindow {
 public:
  explicit ProfileWindow(const ProfileOptions& options);
  ~ProfileWindow();
  ProfileWindow(const ProfileWindow&) = delete;
  ProfileWindow& operator=(const ProfileWindow&) = delete;

  /// `step` of this process, from 0, begins.
  void begin_step(int64_t step);
  /// So many steps of it are done; the window's last one writes. Errors name the file.
  void end_step(int64_t steps_done);
  /// Writes a window that the end of the training has cut.
  void finish();

 private:
  class Recording;
  ProfileOptions options_;
  std::unique_ptr<Recording> recording_; ///< null outside of the window
};

} // namespace tessera::internal
