#pragma once

// Internal: a transformer as a PlannedModel.

#include <tessera/plan/models/transformer_config.h>
#include <tessera/plan/planned_model.h>

namespace tessera::internal::models {

/// `sequence` is the length of a row of tokens.
PlannedModel plan_transformer(const TransformerConfig& config, int64_t sequence);

/// The operations of a forward and backward of one row: 6 for each weight of a matrix that a token meets, and 12 · layers · heads
/// · head size · length for each token's attention, all of it also where it is causal (arXiv:2204.02311, appendix B). Of a
/// mixture those of the experts that a token goes to count.
double flops_a_row(const TransformerConfig& config, int64_t sequence);

} // namespace tessera::internal::models
