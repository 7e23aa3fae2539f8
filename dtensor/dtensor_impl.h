#pragma once

// Internal: what makes an at::Tensor a DTensor.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/dtensor/spec.h>

namespace tessera::internal {

/// The replicated value of a one-element Partial tensor, kept so that reading it twice reduces once.
struct ReducedValue {
  at::Tensor local;
  SpecPtr spec;
  uint32_t version, local_version; ///< of the DTensor and of its local tensor when it was reduced
};

/// What errors call a tensor, as "the gradient of blocks.0.weight". Put into words only when it is asked for.
struct TensorName : c10::intrusive_ptr_target {
  virtual std::string to_string() const = 0;
};

/// Hangs off a TensorImpl that has the key `Fake`, the global shape and no storage. Shared by shallow copies (`data()`,
/// `detach()`).
struct DTensorMeta : c10::BackendMeta {
  DTensorMeta(at::Tensor local_tensor, SpecPtr tensor_spec) : local(std::move(local_tensor)), spec(std::move(tensor_spec)) {}
  /// An error, of which `reader` is the subject, for a tensor that only stands in the place of values.
  virtual void check_has_values([[maybe_unused]] std::string_view reader) const {}

  at::Tensor local; ///< this rank's part; a plain tensor without autograd history
  SpecPtr spec;
  std::shared_ptr<const ReducedValue> reduced; ///< guarded by a lock in redistribute.cpp, as the next is
  bool keeps_reduced = true;                   ///< false where a view shares the memory
  /// Set on a view whose data had to move, between ranks or to close gaps: it holds the base's value at this version, and cannot
  /// be written.
  std::optional<uint32_t> copied_at_version;
  c10::intrusive_ptr<const TensorName> name; ///< of this tensor, or of one that it was computed from; null for most
  bool computed = false;                     ///< by an operator: the name is that of one of its arguments
  /// Set on sharded parameters, and on what is computed from such alone without a gradient to come: where it meets a plain
  /// tensor, the whole of it is used, in this dtype. Without it such a mix is an error.
  std::optional<at::ScalarType> whole_dtype;
  /// Made from the shape of a sharded parameter alone (`ones_like`): beside a parameter in grad mode it counts as a plain tensor.
  bool of_shape_only = false;
  /// Shared with views, where this was computed or is an inference tensor: true once other values were written to one of them.
  std::shared_ptr<bool> overwritten;
};

/// Whether another DTensor, or what `to_local` returned, lies in the memory of this one. The same on every rank, which the use
/// count of the storage alone is not: of one element that is selected, the ranks without it have a view of nothing.
inline bool shares_memory(const DTensorMeta& meta) {
  const bool counts_versions = !meta.local.is_inference();
  const bool has_views = counts_versions ? !meta.local.unsafeGetTensorImpl()->unique_version() : meta.overwritten.use_count() > 1;
  return has_views || meta.local.storage().use_count() > 1;
}

/// The `whole_dtype` of a DTensor to which no other values were written, neither to it nor to one that shares its memory.
inline std::optional<at::ScalarType> whole_dtype_of(const DTensorMeta& meta) {
  return meta.overwritten && *meta.overwritten ? std::nullopt : meta.whole_dtype;
}

/// The key below autograd whose fallback runs an op on the local tensors.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::Fake;

/// The meta of a DTensor; null for any other tensor (undefined included).
inline DTensorMeta* dtensor_meta(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kDTensorKey)) return nullptr;
  return static_cast<DTensorMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// A new DTensor (not requiring grad) from this rank's part. `local` must have `spec->local_sizes()` and `spec->dtype()`.
at::Tensor make_dtensor(at::Tensor local, SpecPtr spec);

/// What an error says where a program asks a DTensor for the storage that it does not have. LibTorch keeps two copies of the text
/// in each tensor: where a step makes many, as of gradients, one that needs no memory of its own.
enum class StorageError { kInFull, kBrief };

at::Tensor make_dtensor(c10::intrusive_ptr<DTensorMeta> meta, StorageError error = StorageError::kInFull);

/// Strides of a tensor of `sizes` whose dims follow one another in memory as those of its part `local` do, without its gaps,
/// which may differ between ranks. None, for row-major ones, where the part is contiguous, has merged dims, or overlaps with
/// itself.
std::vector<int64_t> strides_like(const at::Tensor& local, c10::IntArrayRef sizes);

/// Another handle of the same DTensor: the meta is shared, the key set is copied, autograd history is not.
at::Tensor alias_dtensor(const at::Tensor& dtensor);

/// Turns `tensor` into a DTensor in place: its handle, autograd meta and every holder of it stay; its storage is let go.
/// `extra_keys` are added to its key set (fsdp adds its own).
void become_dtensor(const at::Tensor& tensor, c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys = {});

} // namespace tessera::internal
