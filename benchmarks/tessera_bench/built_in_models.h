#pragma once

#include <tessera/benchmarks/bench.h>

namespace tessera::benchmarks {

/// gpt, mlp, resnet (convolutions), moe (four experts a block), dlrm (tables of embeddings) and encoder (LibTorch's transformer
/// layer), on random numbers that are the same in each step and others on each rank.
BenchModels built_in_models();

} // namespace tessera::benchmarks
