#pragma once

#include <c10/core/ScalarType.h>
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

/// A call of `fully_shard` or `replicate` that took parameters, on this rank.
struct GroupSummary {
  std::string name;            ///< what errors and collectives call it
  std::string mesh;            ///< "4 ranks", "2 x 2 ranks"
  std::string strategy;        ///< its row of `kStrategies`
  std::string layout;          ///< "ragged" or "per-parameter"
  int64_t parameters = 0;      ///< how many
  int64_t shard_bytes = 0;     ///< this rank's part, in the parameters' dtypes
  int64_t unsharded_bytes = 0; ///< while gathered, in the dtypes that a forward reads; 0 where nothing is copied
  int64_t gather_bytes = 0;    ///< payload of one all-gather, with padding, without gather extensions: U of docs/strategies.md;
                               ///< of a quantized one codes and scales
  int64_t reduce_bytes = 0;    ///< of a buffer of its gradients, in the reduce dtype; 0 where nothing is reduced
  int64_t reduce_payload_bytes = 0; ///< of the collectives of one reduction, of a quantized one codes and scales
  int64_t padding_bytes = 0;        ///< of what is unsharded, beyond the parameters
  bool reshards_after_forward = false;
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

namespace internal {

class ParameterGroup;

GroupSummary summary_of(const ParameterGroup& group);
/// Describes the groups for people, a line for each.
std::string group_table(const std::vector<GroupSummary>& groups);

} // namespace internal

} // namespace tessera
