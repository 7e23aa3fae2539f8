#pragma once

/// Models whose work is split over ranks within a batch's rows: what torch.distributed.tensor.experimental's context parallel is
/// in Python.

#include <tessera/mesh.h>
#include <tessera/mesh/part_order.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>
