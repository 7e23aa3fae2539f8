#pragma once

// Internal: which memory a tensor had before it was sharded.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::internal {

/// The bytes of a tensor. Keeps the address of their storage from being used again, not the bytes.
class MemoryRange {
 public:
  /// Nothing for a tensor without memory of its own.
  static std::optional<MemoryRange> of(const at::Tensor& tensor);

  const c10::StorageImpl* storage() const { return owner_._unsafe_get_target(); }
  /// Whether a byte belongs to both; one in a gap of a tensor, as between a slice of columns and the next row of it, does not.
  bool overlaps(const MemoryRange& other) const;

 private:
  struct Dim {
    int64_t size, stride; // in bytes
  };

  explicit MemoryRange(const at::Tensor& tensor);
  /// Returns where the runs without gaps begin, in order.
  std::vector<int64_t> runs() const;

  c10::weak_intrusive_ptr<c10::StorageImpl> owner_;
  int64_t begin_, end_;
  int64_t run_bytes_;      ///< of a part without gaps
  std::vector<Dim> steps_; ///< from one such part to the next; none where there is one
};

} // namespace tessera::internal
