#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

namespace tessera::testing::scripts {

/// Where the two sides of a script part.
struct ScriptFailure {
  int64_t step = 0;
  std::string report;          ///< the models, the sharding, the steps so far, and what differs
  bool ranks_disagree = false; ///< an error on some ranks alone: they are no longer in step
};

/// From this number on scripts compute in low precision: their unsharded side emulates a policy.
constexpr uint64_t kFirstInLowPrecision = 1'000'000;

/// From this number on half of a script's actions are those of a parallel model.
constexpr uint64_t kFirstInParallel = 2'000'000;

/// Runs script `seed`: two models, a sharding and 10 to 20 actions, all drawn from the seed, on an unsharded and a sharded side,
/// which are compared after each action. `folder` takes checkpoints. Steps in `left_out` are passed over. Every rank calls it,
/// and has a failure when any has.
std::optional<ScriptFailure> run_script(uint64_t seed, const std::filesystem::path& folder,
                                        const std::set<int64_t>& left_out = {});

} // namespace tessera::testing::scripts
