#pragma once

// Internal: which memory a tensor had before it was sharded.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace tessera::fsdp_internal {

/// The bytes of a dense tensor. Keeps the address of their storage from being used again, not the bytes.
class MemoryRange {
 public:
  /// Nothing for a tensor without memory of its own, or with gaps in it.
  static std::optional<MemoryRange> of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta() || tensor.numel() == 0) return std::nullopt;
    if (!tensor.is_non_overlapping_and_dense()) return std::nullopt;
    const auto begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    return MemoryRange(tensor.storage(), begin, begin + static_cast<int64_t>(tensor.nbytes()));
  }

  const c10::StorageImpl* storage() const { return storage_._unsafe_get_target(); }
  bool overlaps(const MemoryRange& other) const {
    return storage() == other.storage() && begin_ < other.end_ && other.begin_ < end_;
  }

 private:
  MemoryRange(const c10::Storage& storage, int64_t begin, int64_t end)
      : storage_(storage.getWeakStorageImpl()), begin_(begin), end_(end) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  int64_t begin_, end_;
};

} // namespace tessera::fsdp_internal
