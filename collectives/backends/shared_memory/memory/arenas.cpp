#include <tessera/collectives/backends/shared_memory/memory/arenas.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal::shared_memory {

std::shared_ptr<Arena> Arenas::own(int processes) {
  std::lock_guard lock(mutex_);
  try {
    if (!std::exchange(made_, true)) own_ = Arena::create(processes);
  } catch (const c10::Error&) { // data go through the lanes then
  }
  return own_;
}

char* Arenas::open(int64_t rank, pid_t process, int descriptor, int64_t bytes) {
  std::lock_guard lock(mutex_);
  auto& segment = others_[rank];
  if (segment.data() == nullptr) segment = Segment::open(process, descriptor, bytes);
  return segment.data();
}

} // namespace tessera::internal::shared_memory
