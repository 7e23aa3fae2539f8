#pragma once

// Internal: the order of copies that several threads make for a call.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace tessera::internal {

/// The calling thread's current stream of the device of `tensor`; none on the CPU. Another thread that copies from or to it for
/// this one does so there: its own stream does not come after what this one has launched.
inline std::optional<c10::Stream> caller_stream(const at::Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu() || device.is_meta()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace tessera::internal
