#pragma once

// Internal: what makes an at::Tensor a DTensor.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/base/dispatch_keys.h>
#include <tessera/dtensor/spec.h>
#include <tessera/dtensor/tensor/provenance.h>

namespace tessera::internal {

/// The replicated value of a one-element Partial tensor, kept so that reading it twice reduces once.
struct ReducedValue {
  at::Tensor local;
  SpecPtr spec;
  uint32_t version, local_version; ///< of the DTensor and of its local tensor when it was reduced
};

/// Hangs off a TensorImpl that has the key `Fake`, the global shape and no storage. Shared by shallow copies (`data()`,
/// `detach()`).
struct DTensorMeta : c10::BackendMeta {
  DTensorMeta(at::Tensor local_tensor, SpecPtr tensor_spec) : local(std::move(local_tensor)), spec(std::move(tensor_spec)) {}
  /// Throws for a tensor that only stands in the place of values, before `local` and `spec` are read: an error of which `reader`
  /// is the subject. A view of a sharded parameter asks that for them.
  virtual void check_has_values([[maybe_unused]] std::string_view reader) {}
  /// The DTensor that holds the values of such a view; undefined for all others, which hold their own.
  virtual at::Tensor realized() const { return {}; }
  /// Whether a gradient of such a leaf is to lie as the leaf does. False where whoever made the leaf takes its gradient.
  virtual bool places_gradient() const { return true; }
  /// The leaf that stands for `self` in the graph of a redistribution or of `to_local`; undefined where it stands for itself.
  virtual at::Tensor leaf_in_graph([[maybe_unused]] const at::Tensor& self) const { return {}; }

  at::Tensor local; ///< this rank's part; a plain tensor without autograd history
  SpecPtr spec;
  std::shared_ptr<const ReducedValue> reduced; ///< guarded by a lock in redistribute.cpp, as the next is
  bool keeps_reduced = true;                   ///< false where a view shares the memory
  /// Set on a view whose data had to move, between ranks or to close gaps: it holds the base's value at this version, and cannot
  /// be written.
  std::optional<uint32_t> copied_at_version;
  Provenance provenance;
};

/// Whether another DTensor, or what `to_local` returned, lies in the memory of this one. The same on every rank, which the use
/// count of the storage alone is not: of one element that is selected, the ranks without it have a view of nothing.
inline bool shares_memory(const DTensorMeta& meta) {
  const bool counts_versions = !meta.local.is_inference();
  const bool has_views =
      counts_versions ? !meta.local.unsafeGetTensorImpl()->unique_version() : meta.provenance.overwritten.use_count() > 1;
  return has_views || meta.local.storage().use_count() > 1;
}

/// The meta of a DTensor; null for any other tensor (undefined included).
inline DTensorMeta* dtensor_meta(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kDTensorKey)) return nullptr;
  return static_cast<DTensorMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// What an error calls a DTensor: "the gradient of blocks.0.weight", "what was computed from the parameter weight"; where it has
/// no name, what it is: "float[5, 3] (Shard(0)) on DeviceMesh(…)".
std::string description_of(const DTensorMeta& meta);

/// A new DTensor (not requiring grad) from this rank's part. `local` must have `spec->local_sizes()` and `spec->dtype()`.
at::Tensor make_dtensor(at::Tensor local, SpecPtr spec);

at::Tensor make_dtensor(c10::intrusive_ptr<DTensorMeta> meta);

/// Strides of a tensor of `sizes` whose dims follow one another in memory as those of its part `local` do, without its gaps,
/// which may differ between ranks. None, for row-major ones, where the part is contiguous, has merged dims, or overlaps with
/// itself.
std::vector<int64_t> strides_like(const at::Tensor& local, c10::IntArrayRef sizes);

/// Another handle of the same DTensor: the meta is shared, the key set is copied, autograd history is not.
at::Tensor alias_dtensor(const at::Tensor& dtensor);

/// Puts the error of whoever asks for the storage of a tensor that became a DTensor into words: again where its name has changed.
void word_storage_error(const at::Tensor& dtensor);

/// Turns `tensor` into a DTensor in place: its handle, autograd meta and every holder of it stay; its storage is let go.
/// `extra_keys` are added to its key set.
void become_dtensor(const at::Tensor& tensor, c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys = {});

} // namespace tessera::internal
