#pragma once

#include <tessera/collectives/trace/job_trace.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace tessera::python {

/// The record of this process's collectives, for `tessera-trace`: one from each group of all ranks to the next. Null before the
/// first, and where `TESSERA_TRACE_CALLS` is 0.
std::shared_ptr<internal::JobTrace> process_trace();

/// Begins it. Called by each rank of the job as it makes the group of all ranks, with that group's store.
void begin_process_trace(c10d::Store& store, int rank, int world_size);

} // namespace tessera::python
