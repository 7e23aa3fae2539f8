#pragma once

// Internal: tensors over memory that is there.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace tessera::internal {

/// A tensor over `storage` that is no view of another, so that a collective into the storage bumps nobody's version counter.
/// Row-major where no strides are given.
inline at::Tensor tensor_over(const c10::Storage& storage, int64_t byte_offset, c10::IntArrayRef sizes, c10::ScalarType dtype,
                              c10::DispatchKeySet extra_keys = {}, c10::IntArrayRef strides = {}) {
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  const auto backend = c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), backend | extra_keys, meta);
  impl->set_storage_offset(byte_offset / static_cast<int64_t>(meta.itemsize()));
  if (strides.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return at::Tensor(std::move(impl));
}

} // namespace tessera::internal
