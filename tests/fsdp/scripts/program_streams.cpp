#include "program_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {

ProgramStreams::ProgramStreams(uint64_t seed) {
  Draw draw(seed);
  if (tests_the_cpu() || !draw.chance(40)) return;
  const c10::impl::VirtualGuardImpl device(test_device_type());
  streams_.push_back(device.getStream(test_device()));
  for (auto more = 1 + draw.below(2); more > 0; --more)
    streams_.push_back(device.getStreamFromGlobalPool(test_device(), draw.chance(20)));
}

std::string ProgramStreams::description() const {
  return streams_.empty() ? "" : c10::str("  on ", streams_.size(), " streams in turn\n");
}

std::optional<c10::Stream> ProgramStreams::choose(uint64_t seed) const {
  if (streams_.empty()) return std::nullopt;
  return Draw(seed).of(streams_);
}

} // namespace tessera::testing::scripts
