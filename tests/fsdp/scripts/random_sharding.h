#pragma once

#include <string>

#include <tessera/tests/fsdp/scripts/random_model.h>

namespace tessera::testing::scripts {

/// How a model was sharded.
struct Sharding {
  std::string description;
  bool reduces_in_float = false; ///< a group's gradients are reduced in float
};

/// Shards `model` as `seed` says: the mesh (flat or 2-D, with dims of 1 as well), `fully_shard` or `replicate`, which modules,
/// alone or in a list, and the options of each; gather extensions where `extends`. Every rank calls it.
Sharding shard_at_random(RandomModel& model, uint64_t seed, bool extends);

} // namespace tessera::testing::scripts
