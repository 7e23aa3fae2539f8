#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/collectives/communicator.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// What one rank says about the collective it takes part in. Ranks exchange these records and compare them, so that ranks that
/// call different collectives get an error instead of a hang or wrong numbers. Sent as plain bytes between equal builds.
struct Signature {
  uint64_t sequence = 0;   ///< how many collectives this communicator ran before
  uint64_t label_hash = 0; ///< of the whole label
  int64_t bytes = 0;       ///< the full buffer; 0 when ranks may differ (all_to_all)
  int32_t root = -1;       ///< of a broadcast
  uint8_t kind = 0;        ///< CollectiveKind
  uint8_t reduce_op = 0;   ///< ReduceOp
  int8_t dtype = 0;        ///< c10::ScalarType
  uint8_t label_length = 0;
  char label[96] = {}; ///< the first characters, to name it in errors

  static constexpr size_t kLabelCapacity = sizeof(label);

  std::string_view label_text() const { return {label, label_length}; }
  /// True when both ranks take part in the same collective.
  bool same_collective(const Signature& other) const;
  /// For example: all_gather 'blocks.0' (4096 bytes of float, call 12).
  std::string to_string() const;
};
static_assert(sizeof(Signature) == 128);

Signature make_signature(CollectiveKind kind, std::string_view label, c10::ScalarType dtype, int64_t bytes,
                         ReduceOp op = ReduceOp::kSum, int root = -1);

/// "sum", "avg", …
const char* to_string(ReduceOp op);

/// One line a rank: what it called. `signatures[i]` is of global rank `ranks[i]`.
std::string describe_signatures(const std::vector<Signature>& signatures, const std::vector<int64_t>& ranks);

} // namespace tessera::internal
