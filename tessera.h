#pragma once

/// All public headers of Tessera, by its doors.

#include <tessera/checkpoint.h>
#include <tessera/collectives.h>
#include <tessera/dtensor.h>
#include <tessera/fsdp.h>
#include <tessera/mesh.h>
#include <tessera/parallel.h>
#include <tessera/plan.h>
#include <tessera/training.h>
