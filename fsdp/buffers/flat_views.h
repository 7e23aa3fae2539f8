#pragma once

// Internal: the elements of a tensor as a flat one, and the versions of tensors that share memory.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <tessera/base/tensor_over.h>

#include <cstdint>

namespace tessera::internal {

/// `numel` elements of `bytes` from `byte_offset`, as a flat view.
inline at::Tensor flat_view(const at::Tensor& bytes, int64_t byte_offset, int64_t numel, at::ScalarType dtype) {
  return bytes.narrow(0, numel > 0 ? byte_offset : 0, numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

/// `numel` elements of a dense tensor from `begin` in the order of its memory, without the cost of an operator: a group has many.
inline at::Tensor flat_range(const at::Tensor& dense, int64_t begin, int64_t numel) {
  if (dense.is_conj() || dense.is_neg() || dense._is_zerotensor()) return dense.view({-1}).narrow(0, begin, numel);
  const auto offset = (dense.storage_offset() + begin) * static_cast<int64_t>(dense.element_size());
  return tensor_over(dense.storage(), offset, {numel}, dense.scalar_type());
}

/// The elements of a dense tensor in the order of its memory.
inline at::Tensor in_memory_order(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

/// A write to one of them is seen by what autograd saved of the other, as between a tensor and its views.
inline void share_version(const at::Tensor& tensor, const at::Tensor& other) {
  other.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
}

} // namespace tessera::internal
