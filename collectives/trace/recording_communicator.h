#pragma once

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/trace/job_trace.h>

#include <functional>
#include <memory>

namespace tessera::internal {

/// Makes a communicator whose calls are recorded in `trace`: what `connect` returns, behind one that forwards to it. The making
/// itself is recorded as well.
CommunicatorPtr make_recorded(std::shared_ptr<JobTrace> trace, RecordedGroup group,
                              const std::function<CommunicatorPtr()>& connect);

} // namespace tessera::internal
