#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

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

namespace internal {

class ParameterGroup;

GroupSummary summary_of(const ParameterGroup& group);
/// Describes the groups for people, a line for each.
std::string group_table(const std::vector<GroupSummary>& groups);

} // namespace internal

} // namespace tessera
