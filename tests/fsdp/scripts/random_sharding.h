#pragma once

#include <tessera/mixed_precision/policy.h>

#include <optional>
#include <string>

#include <tessera/tests/fsdp/scripts/random_model.h>

namespace tessera::testing::scripts {

/// How a model was sharded.
struct Sharding {
  std::string description;
  bool ignores = false; ///< some parameters, whose gradients the program reduces itself
  bool computes_in_float = false;
  bool rounds_to_float = false; ///< a group computes, or reduces its gradients, in float
};

/// Shards `model` as `seed` says: the mesh or several of them, `fully_shard` or `replicate`, which modules, alone or in
/// a list, and the options of each; gather extensions where `extends`. With `emulated`, a policy that the unsharded side
/// emulates, and else with one that it need not, or none. Every rank calls it.
Sharding shard_at_random(RandomModel& model, uint64_t seed, bool extends,
                         const std::optional<MixedPrecisionPolicy>& emulated = {});

} // namespace tessera::testing::scripts
