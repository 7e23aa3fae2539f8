#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/process_group_options.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/ranks/rendezvous.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::internal {

struct JoinedJob {
  c10::intrusive_ptr<c10d::Store> store;     ///< for this time, with the keys of no other
  c10::intrusive_ptr<c10d::Store> job_store; ///< of the launcher or rank 0, which `store` is a part of
  Places places;                             ///< of all ranks
  int& times; ///< how often this process has joined with this store; the caller counts this time when nothing can fail any more
};

/// Connects to the job's store, hosting it where this rank has to, and waits for all ranks. Called by every rank, and by one
/// thread of it at a time. Throws after the timeout, and names the ranks that are missing.
JoinedJob join_job(const JobEnvironment& job, const ProcessGroupOptions& options);

} // namespace tessera::internal
