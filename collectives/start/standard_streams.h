#pragma once

namespace tessera::internal {

/// Opens /dev/null in place of each standard stream that this process was started without (`2>&-`). Otherwise the next socket or
/// shared memory has its descriptor, and what the program prints is written there.
void open_standard_streams() noexcept;

} // namespace tessera::internal
