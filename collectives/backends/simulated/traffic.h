#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::internal {

/// How an operator treats memory, from its schema.
struct OperatorTraffic {
  bool moves = false;   ///< it is no view, and no mere allocation
  bool returns = false; ///< its results are new tensors
  bool picks = false;   ///< of its first tensor it reads as much as it returns, as an embedding does
  uint64_t read = 0;    ///< its arguments that it reads, a bit each
  uint64_t written = 0; ///< ... that it writes
};

/// What is known of operators that were called.
class KnownTraffic {
 public:
  /// Says it of the operator that is called, and keeps it.
  const OperatorTraffic& of(const at::RecordFunction& call);

 private:
  /// The address of its name tells an operator from others: it is that of the registered schema.
  absl::flat_hash_map<const void*, std::unique_ptr<OperatorTraffic>> known_;
};

/// Bytes of the tensors in `value`, of an expanded one those that it has memory for; 0 for a DTensor, whose parts count when the
/// kernel on them is called.
double bytes_in(const c10::IValue& value);

/// Bytes of the arguments that an operator reads and writes.
double argument_bytes(const OperatorTraffic& traffic, c10::ArrayRef<c10::IValue> arguments);
/// ... and of its results.
double result_bytes(const OperatorTraffic& traffic, const std::vector<c10::IValue>& results);

} // namespace tessera::internal
