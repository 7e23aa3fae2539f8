#pragma once

namespace tessera::testing::sim {

/// From now on the checker also sees what the host's own operators read and write of pinned memory, whose copies from and to the
/// device may be in flight meanwhile. A second call does nothing.
void watch_host_accesses();

} // namespace tessera::testing::sim
