#pragma once

/// Ranks that find each other, and collectives between them: what torch.distributed is in Python.

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/record_error.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/collectives/simulated_clock.h>
#include <tessera/collectives/topology.h>
