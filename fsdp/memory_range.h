#pragma once

// Internal: which memory a tensor had before it was sharded.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace tessera::internal {

/// The bytes of a dense tensor. Keeps the address of their storage from being used again, not the bytes.
struct MemoryRange {
  /// Nothing for a tensor without memory of its own, or with gaps in it.
  static std::optional<MemoryRange> of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta() || tensor.numel() == 0) return std::nullopt;
    if (!tensor.is_non_overlapping_and_dense()) return std::nullopt;
    const auto begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    return MemoryRange{tensor.storage().getWeakStorageImpl(), begin, begin + static_cast<int64_t>(tensor.nbytes())};
  }

  const c10::StorageImpl* storage() const { return owner._unsafe_get_target(); }
  bool overlaps(const MemoryRange& other) const { return storage() == other.storage() && begin < other.end && other.begin < end; }

  c10::weak_intrusive_ptr<c10::StorageImpl> owner;
  int64_t begin, end;
};

} // namespace tessera::internal
