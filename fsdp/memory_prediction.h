#pragma once

// Internal: what a step will hold in memory, from what is sharded.

#include <tessera/fsdp/explain.h>

namespace tessera::internal {

class ParameterGroup;
class ShardedModule;

/// Of the model below `root`. The sizes of `known` that no group decides are there already: plain parameters, and buffers.
MemoryPrediction predict_memory(ShardedModule& root, const ExplainOptions& options, MemoryPrediction known);

/// Bytes of the group's buffer of gradients, before they are reduced; 0 where they are not.
int64_t reduce_bytes_of(const ParameterGroup& group);

} // namespace tessera::internal
