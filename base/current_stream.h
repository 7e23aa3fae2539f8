#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace tessera::internal {

/// Whether operators on the device only begin when the host calls them, in the order of a stream.
inline bool is_asynchronous(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

/// The calling thread's current stream on an asynchronous device.
inline c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

/// The current stream; none where operators run at once. Another thread that copies for this one does so on it: its own comes
/// after nothing that this thread has launched.
inline std::optional<c10::Stream> current_stream_if_any(c10::Device device) {
  if (!is_asynchronous(device)) return std::nullopt;
  return current_stream(device);
}

} // namespace tessera::internal
