#include <tessera/collectives/counters.h>

namespace tessera {

const char* to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather: return "all_gather";
    case CollectiveKind::kReduceScatter: return "reduce_scatter";
    case CollectiveKind::kAllReduce: return "all_reduce";
    case CollectiveKind::kAllToAll: return "all_to_all";
    case CollectiveKind::kBroadcast: return "broadcast";
    case CollectiveKind::kBarrier: return "barrier";
    case CollectiveKind::kSend: return "send";
    case CollectiveKind::kReceive: return "receive";
  }
  return "unknown";
}

void CollectiveCounters::add(CollectiveKind kind, int64_t bytes) {
  auto& entry = entries_[static_cast<size_t>(kind)];
  entry.calls += 1;
  entry.bytes += bytes;
}

CollectiveCounters::Count CollectiveCounters::get(CollectiveKind kind) const {
  const auto& entry = entries_[static_cast<size_t>(kind)];
  return {entry.calls, entry.bytes};
}

void CollectiveCounters::reset() {
  for (auto& entry : entries_) entry.calls = entry.bytes = 0;
}

} // namespace tessera
