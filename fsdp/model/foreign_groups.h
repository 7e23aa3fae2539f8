#pragma once

// Internal: parameters below a module that belong to another model.

#include <absl/container/flat_hash_set.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::internal {

class Schedule;
class ShardedModule;

/// An error, after `what`, where a trained sharded parameter below `module` belongs to a model that has none of these schedules:
/// what is set on theirs does not reach it.
void check_owns_all_parameters(const torch::nn::Module& module, const char* what,
                               const absl::flat_hash_set<const Schedule*>& schedules);

/// The states of the modules in `module` that were sharded by themselves, from the top. An error, after `what`, where the
/// parameters of `module` were sharded with those of a module above it.
std::vector<std::shared_ptr<ShardedModule>> sharded_within(const torch::nn::Module& module, const char* what);

/// The modules of other models below those of `state`, sharded by themselves.
std::vector<std::shared_ptr<ShardedModule>> foreign_modules_below(const ShardedModule& state);

} // namespace tessera::internal
