#pragma once

#include <absl/container/inlined_vector.h>

#include <string>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

/// The parts of DTensors that a call writes in place, where their placements do not allow the operator: it writes copies under
/// other placements, and what becomes of these is copied back. So the DTensors keep their placements and their memory.
class BorrowedLocals {
 public:
  /// The local tensor of `meta` under `target`, to be written; the same one for the same DTensor. Every rank calls it.
  at::Tensor take(DTensorMeta& meta, const SpecPtr& target, const std::string& op);
  /// Copies all of them back. Every rank calls it.
  void give_back(const std::string& op) const;
  bool empty() const { return loans_.empty(); }

 private:
  struct Loan {
    DTensorMeta* meta;
    SpecPtr target;
    at::Tensor local;
  };
  absl::InlinedVector<Loan, 1> loans_;
};

} // namespace tessera::internal::dispatch
