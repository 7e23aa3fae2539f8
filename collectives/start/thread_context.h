#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace tessera {
class ProcessContext;
}

namespace tessera::internal {

/// The process context of the calling thread where that is a rank of its own (RankScope); null where it is a part of the
/// process's. Autograd carries it to the threads that run the backward of a device's operators, and so does `at::launch`: it is
/// a part of LibTorch's debug information.
ProcessContext* thread_context();

/// `context` is the calling thread's until the guard ends.
c10::DebugInfoGuard enter_context(std::shared_ptr<ProcessContext> context);

} // namespace tessera::internal
