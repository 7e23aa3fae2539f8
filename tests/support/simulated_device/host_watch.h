#pragma once

#include <ATen/record_function.h>

#include <mutex>
#include <optional>

namespace tessera::testing::sim {

/// A callback for every operator that the host calls. It costs each of them some time, and so is called only while it is on.
class HostWatch {
 public:
  static HostWatch& get();

  /// From now on this is called while the watch is on. A second call does nothing.
  void set(at::RecordFunctionCallback callback);
  void turn(bool on);

 private:
  std::mutex mutex_;
  std::optional<at::CallbackHandle> handle_;
  bool is_on_ = false;
};

} // namespace tessera::testing::sim
