#pragma once

/// Models whose layers, sequences or experts are split over ranks: what torch.distributed.tensor.parallel and the context
/// parallel of torch.distributed.tensor.experimental are in Python.

#include <tessera/dtensor.h>
#include <tessera/mesh.h>
#include <tessera/mesh/part_order.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/experts.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/pipeline_schedule.h>
#include <tessera/parallel/pipeline_stages.h>
#include <tessera/parallel/plan_for.h>
#include <tessera/parallel/split_logits.h>
#include <tessera/parallel/split_sequence.h>
#include <tessera/parallel/styles.h>
