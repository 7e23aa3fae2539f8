#pragma once

// Internal: the storage behind a group's unsharded parameters.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace tessera::fsdp_internal {

class ParameterGroup;

/// The key above autograd, autocast and functorch whose fallback sees every read of a sharded parameter, of its unsharded leaf,
/// and of the leaf's views (which copy the key set).
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::DeferredInit;

/// The memory of a group's unsharded parameters: empty while sharded. Views that autograd saved stay valid across a release and
/// an allocation, because the StorageImpl is the same. Knows its group, so that any view of a leaf leads to it.
class UnshardedStorage final : public c10::StorageImpl {
 public:
  UnshardedStorage(c10::Device device, ParameterGroup* group)
      : StorageImpl(use_byte_size_t(), 0, c10::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false),
        group_(group) {}

  void fill(c10::DataPtr memory, int64_t bytes) {
    set_data_ptr_noswap(std::move(memory));
    set_nbytes(static_cast<size_t>(bytes));
  }
  void release() {
    const auto device = data_ptr().device();
    set_nbytes(size_t{0});
    set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  }

  /// Null once the group is gone.
  ParameterGroup* group() const { return group_; }
  void forget_group() { group_ = nullptr; }

 private:
  ParameterGroup* group_;
};

/// The storage behind a leaf or one of its views; null for any other tensor.
inline UnshardedStorage* unsharded_storage(const at::TensorBase& tensor) {
  return dynamic_cast<UnshardedStorage*>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

/// A tensor over `storage` that is no view of another, so that a collective into the storage bumps nobody's version counter.
inline at::Tensor tensor_over(const c10::Storage& storage, int64_t byte_offset, c10::IntArrayRef sizes, c10::ScalarType dtype,
                              c10::DispatchKeySet extra_keys = {}) {
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  const auto backend = c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), backend | extra_keys, meta);
  impl->set_storage_offset(byte_offset / static_cast<int64_t>(meta.itemsize()));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

} // namespace tessera::fsdp_internal
