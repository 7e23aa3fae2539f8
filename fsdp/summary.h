#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/fsdp/group_summary.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

/// A parameter of a model, and how it lies on the ranks.
struct ParameterSummary {
  std::string name;         ///< full, from the model
  std::string module;       ///< the module that has it; empty for the model itself
  std::string module_class; ///< "torch::nn::LinearImpl"
  std::string group;        ///< what errors and collectives call the group of its `fully_shard`; empty without one
  std::string placements;   ///< one a mesh dim, as "(Replicate(), Shard(0))"; empty for a plain tensor
  at::ScalarType dtype = at::kFloat;
  at::ScalarType forward_dtype = at::kFloat; ///< what a forward reads: the policy's `param_dtype`, or its own
  int64_t bytes = 0;                         ///< of the whole parameter
  int64_t local_bytes = 0;                   ///< of this rank's part; 0 on the meta device
  bool requires_grad = false;
  bool trains_apart = false; ///< it trains, and nothing sharded or replicated it, beside others that are
  std::string tied_to;       ///< the name under which the same parameter came before; its bytes are counted there
};

/// What is sharded in a model, and how.
struct ModelSummary {
  std::vector<ParameterSummary> parameters; ///< in the order of the modules
  std::vector<GroupSummary> groups;         ///< in the order of their first parameters
  int64_t buffers = 0, buffer_bytes = 0;    ///< every rank has them whole; those that share memory are one

  /// A table of modules, one of groups, and sums. Parameters that train apart are named at the end.
  std::string to_string() const;
};

std::ostream& operator<<(std::ostream& out, const ModelSummary& summary);

/// Says for each parameter of `module` which group it is in, its placements, dtypes and bytes, and whether it is frozen, plain,
/// or trains apart because a `fully_shard` was forgotten: `std::cout << tessera::summary(*model)`. The bytes are this rank's.
/// Local: no communication, and a single rank may call it.
ModelSummary summary(const torch::nn::Module& module);

} // namespace tessera
