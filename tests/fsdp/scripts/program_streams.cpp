#include "program_streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {
namespace {

const c10::impl::VirtualGuardImpl& device_guard() {
  static const c10::impl::VirtualGuardImpl guard(test_device_type());
  return guard;
}

} // namespace

ProgramStreams::ProgramStreams(uint64_t seed) {
  Draw draw(seed);
  if (tests_the_cpu() || !draw.chance(40)) return;
  streams_.push_back(device_guard().getStream(test_device()));
  for (auto more = 1 + draw.below(2); more > 0; --more)
    streams_.push_back(device_guard().getStreamFromGlobalPool(test_device(), draw.chance(20)));
}

std::string ProgramStreams::description() const {
  return streams_.empty() ? "" : c10::str("  on ", streams_.size(), " streams in turn\n");
}

ProgramStreams::Turn::Turn(const ProgramStreams& streams, uint64_t seed) {
  if (streams.streams_.empty()) return;
  before_.push_back(device_guard().getStream(test_device()));
  change_to(Draw(seed).of(streams.streams_));
}

ProgramStreams::Turn::~Turn() {
  if (!before_.empty()) change_to(before_[0]);
}

void ProgramStreams::Turn::change_to(const c10::Stream& stream) {
  c10::Event reached(test_device_type());
  reached.record(device_guard().exchangeStream(stream));
  reached.block(stream);
}

} // namespace tessera::testing::scripts
