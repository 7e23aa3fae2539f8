#pragma once

// Internal: copies of ranges of elements, of which a group has many small ones.

#include <ATen/core/Tensor.h>

#include <cstring>

namespace tessera::internal {

/// Up to this size (bytes) an operator costs more than the copy itself; beyond it, its threads may help.
inline constexpr int64_t kSmallCopyBytes = 64 << 10;

/// Whether ranges of `bytes` of `destination` and `source` can be copied byte by byte, and are small.
inline bool is_small_plain_copy(const at::Tensor& destination, const at::Tensor& source, int64_t bytes) {
  return bytes <= kSmallCopyBytes && destination.is_cpu() && source.is_cpu() &&
         destination.scalar_type() == source.scalar_type() && !source.is_conj() && !source.is_neg();
}

/// Copies, or adds, `numel` elements of the contiguous `source` from element `from` on to the contiguous `destination` from
/// element `to` on. Their shapes do not matter.
inline void copy_elements(const at::Tensor& destination, int64_t to, const at::Tensor& source, int64_t from, int64_t numel,
                          bool add = false) {
  const auto item = static_cast<int64_t>(destination.element_size());
  if (!add && is_small_plain_copy(destination, source, numel * item)) {
    std::memcpy(static_cast<char*>(destination.mutable_data_ptr()) + to * item,
                static_cast<const char*>(source.const_data_ptr()) + from * item, static_cast<size_t>(numel * item));
    return;
  }
  const auto target = destination.view({-1}).narrow(0, to, numel);
  const auto range = source.view({-1}).narrow(0, from, numel);
  if (add) {
    target.add_(range);
  } else {
    target.copy_(range);
  }
}

} // namespace tessera::internal
