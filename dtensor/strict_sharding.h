#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

namespace tessera {

/// While it lives, an operator without a sharding rule is an error, in this thread and in the backwards that it calls. Otherwise
/// it would run on whole tensors, with a warning.
class StrictSharding {
 public:
  StrictSharding();
  StrictSharding(const StrictSharding&) = delete;
  StrictSharding& operator=(const StrictSharding&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

} // namespace tessera
