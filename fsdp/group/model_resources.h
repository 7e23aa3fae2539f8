#pragma once

// Internal: what the groups of one model share: their lock, and of their device.

#include <memory>

#include <tessera/collectives/sums/block_cache.h>
#include <tessera/fsdp/buffers/side_stream.h>
#include <tessera/fsdp/group/model_lock.h>

namespace tessera::internal {

class StepRecorder;

struct ModelResources {
  explicit ModelResources(c10::Device device) : blocks(device), streams(device) {}
  ModelMutex mutex;
  BlockCache blocks; ///< so that one group's freed block is the next one's
  const CommunicationStreams streams;
  std::shared_ptr<StepRecorder> recorder = {}; ///< null while nobody wants a report
};

} // namespace tessera::internal
