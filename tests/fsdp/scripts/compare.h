#pragma once

#include <string>

#include <tessera/tests/fsdp/scripts/side.h>

namespace tessera::testing::scripts {

/// Each of these says on this rank what differs between two sides, by more than `tolerance` × (1 + |expected|); "" for nothing.

/// The recorded numbers. Every rank calls it, with as many of them.
std::string difference_of_recorded(const Side& plain, const Side& sharded, double tolerance);
/// Parameters, buffers, and gradients where all are reduced. Local: each rank compares its own part.
std::string difference_of_state(const Side& plain, const Side& sharded, double tolerance);

/// Whether the numbers of the unsharded models, and what they recorded, are finite and at most `largest`. A script that diverges
/// ends there.
bool is_bounded(const Side& plain, double largest);

/// The sum of every rank's `value`. Every rank calls it.
int64_t sum_over_ranks(int64_t value);

} // namespace tessera::testing::scripts
