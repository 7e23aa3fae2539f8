#pragma once

// Internal: how many bytes tensors hold together.

#include <absl/container/flat_hash_set.h>

#include <cstdint>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

/// Counts the memory of tensors on this rank, each storage once: several modules may have one buffer, or views of it.
class StorageCount {
 public:
  /// False for a tensor whose storage was counted before.
  bool add(const at::Tensor& tensor) {
    const auto* meta = dtensor_meta(tensor);
    const auto& local = meta ? meta->local : tensor;
    if (!local.has_storage()) return seen_.insert(local.unsafeGetTensorImpl()).second;
    const bool is_new = seen_.insert(local.storage().unsafeGetStorageImpl()).second;
    if (is_new) bytes_ += static_cast<int64_t>(local.storage().nbytes());
    return is_new;
  }
  int64_t bytes() const { return bytes_; }

 private:
  absl::flat_hash_set<const void*> seen_;
  int64_t bytes_ = 0;
};

} // namespace tessera::internal
