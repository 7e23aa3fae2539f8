#pragma once

#include <ATen/autocast_mode.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing {

/// While it lives, operators on this type of device autocast to bf16, as Python's `torch.autocast` does.
class AutocastScope {
 public:
  explicit AutocastScope(c10::DeviceType device = test_device_type()) : device_(device) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
  }
  ~AutocastScope() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const c10::DeviceType device_;
};

} // namespace tessera::testing
