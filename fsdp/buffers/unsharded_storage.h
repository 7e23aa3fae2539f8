#pragma once

// Internal: the storage behind a group's unsharded parameters.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <typeinfo>
#include <utility>

#include <tessera/reads/kind.h>

namespace tessera::internal {

class ParameterGroup;

/// The kind of sharded parameters, of views of them, and of their unsharded leaves (fsdp/reads/sharded_kind.cpp).
extern const ReadKind& kShardedParameters;

/// The memory of a group's unsharded parameters: empty while sharded. Views that autograd saved stay valid across a release and
/// an allocation, because the StorageImpl is the same. Knows its group, so that any view of a leaf leads to it.
class UnshardedStorage final : public ReadStorage {
 public:
  UnshardedStorage(c10::Device device, ParameterGroup* group) : ReadStorage(device, kShardedParameters), group_(group) {}

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

/// Bytes of an unsharded storage.
struct UnshardedRange {
  /// Returns the range from the first byte to the last of a leaf or of a view of one.
  static UnshardedRange of(const at::TensorBase& tensor) {
    const auto size = tensor.itemsize(), offset = static_cast<size_t>(tensor.storage_offset());
    const auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, offset);
    return {tensor.storage_offset() * static_cast<int64_t>(size), static_cast<int64_t>(end)};
  }
  bool overlaps(const UnshardedRange& other) const { return begin < other.end && other.begin < end; }
  int64_t begin, end;
};

/// The storage behind a leaf or one of its views; null for any other tensor.
inline UnshardedStorage* unsharded_storage(const at::TensorBase& tensor) {
  auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return storage && typeid(*storage) == typeid(UnshardedStorage) ? static_cast<UnshardedStorage*>(storage) : nullptr;
}

} // namespace tessera::internal
