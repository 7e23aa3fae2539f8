#include <tessera/dtensor/tensor/dtensor_impl.h>

#include <absl/algorithm/container.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/dtensor/tensor/view_replay.h>

namespace tessera::internal {

namespace {

/// `asked` is what a program wants of `meta`: "storage".
std::string no_storage(const char* asked, const DTensorMeta& meta) {
  const auto node = torch::autograd::get_current_node();
  return c10::str("the ", asked, " of ", description_of(meta), " was asked for", node ? " in " + node->name() : "",
                  ": a DTensor has no storage of its own: its data is spread over the ranks of its mesh. Use to_local() for this "
                  "rank's part, full_tensor() or tessera::unsharded() for the whole, tessera::to_string() to print it and "
                  "tessera::checkpoint::save() to save it");
}

c10::DispatchKey backend_key(c10::DeviceType device_type) {
  switch (device_type) {
    case c10::kCUDA: return c10::DispatchKey::CUDA;
    case c10::kPrivateUse1: return c10::DispatchKey::PrivateUse1;
    default: return c10::DispatchKey::CPU; // for meta tensors too
  }
}

/// Whoever asks for its storage gets an error, but for autograd's engine: between two nodes of a backward on different streams of
/// a device it keeps the gradient's memory until both are done with it, which is the memory of this rank's part.
class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(c10::DispatchKeySet keys, caffe2::TypeMeta dtype, c10::Device on) : TensorImpl(keys, dtype, on) {
    set_storage_access_should_throw();
  }

  const c10::Storage& storage() const override {
    const auto* meta = meta_of_dtensor();
    if (!meta) return TensorImpl::storage();
    const bool may_be_engine = !device().is_cpu() && in_backward();
    TORCH_CHECK(may_be_engine, no_storage("storage", *meta));
    return meta->local.storage();
  }

  /// Asked before each access to the data pointer, whose error is the text in the tensor: put into words the first time.
  bool has_storage() const override {
    const auto* meta = meta_of_dtensor();
    if (!meta) return TensorImpl::has_storage();
    const std::lock_guard lock(words_mutex_);
    if (std::exchange(has_words_, true)) return false;
    const_cast<DTensorImpl*>(this)->release_storage_and_set_meta_custom_data_ptr_error_msg_(no_storage("data pointer", *meta));
    return false;
  }

  /// In LibTorch's error, where it asks for the storage and calls nothing of ours before.
  const char* tensorimpl_type_name() const override { return "a DTensor (use to_local())"; }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    auto copy = c10::make_intrusive<DTensorImpl>(key_set(), dtype(), device());
    const std::lock_guard lock(words_mutex_);
    copy_tensor_metadata(this, copy.get(), version_counter, allow_tensor_metadata_change);
    return copy;
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    return shallow_copy_and_detach(std::as_const(version_counter), allow_tensor_metadata_change);
  }

 private:
  /// Null where it was made whole.
  const DTensorMeta* meta_of_dtensor() const {
    return key_set().has(kDTensorKey) ? static_cast<DTensorMeta*>(const_cast<DTensorImpl*>(this)->get_backend_meta()) : nullptr;
  }

  mutable std::mutex words_mutex_; ///< a copy on another thread reads the text
  mutable bool has_words_ = false;
};

c10::intrusive_ptr<c10::TensorImpl> make_impl(c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys) {
  start_view_replay();
  const auto& local = meta->local;
  const c10::DispatchKeySet backend(backend_key(local.device().type()));
  auto impl =
      c10::make_intrusive<DTensorImpl>(backend | c10::DispatchKeySet(kDTensorKey) | extra_keys, local.dtype(), local.device());
  impl->set_sizes_and_strides(meta->spec->sizes(), meta->spec->strides());
  impl->set_backend_meta(std::move(meta));
  return impl;
}

void check_local(const at::Tensor& local, const Spec& spec) {
  TORCH_CHECK(local.sizes() == c10::IntArrayRef(spec.local_sizes()), "the local tensor has shape ", local.sizes(),
              ", but this rank's part of ", spec.to_string(), " has shape ", c10::IntArrayRef(spec.local_sizes()));
  TORCH_CHECK(local.scalar_type() == spec.dtype(), "the local tensor has dtype ", local.scalar_type(), ", but the spec is ",
              spec.to_string());
}

} // namespace

std::string description_of(const DTensorMeta& meta) {
  const auto& provenance = meta.provenance;
  if (!provenance.name) return meta.spec->to_string();
  return (provenance.computed ? "what was computed from " : "") + provenance.name->to_string();
}

at::Tensor make_dtensor(at::Tensor local, SpecPtr spec) {
  return make_dtensor(c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
}

at::Tensor make_dtensor(c10::intrusive_ptr<DTensorMeta> meta) {
  check_local(meta->local, *meta->spec);
  return at::Tensor(make_impl(std::move(meta), {}));
}

std::vector<int64_t> strides_like(const at::Tensor& local, c10::IntArrayRef sizes) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (local.dim() != ndim || local.is_contiguous()) return {};
  std::vector<int64_t> inner_first(ndim), strides(ndim);
  std::iota(inner_first.rbegin(), inner_first.rend(), 0);
  // The inner one of two dims with one stride is that of a single element.
  const auto key = [&](int64_t dim) { return std::pair(local.stride(dim), std::max<int64_t>(local.size(dim), 1)); };
  absl::c_stable_sort(inner_first, [&](int64_t a, int64_t b) { return key(a) < key(b); });
  int64_t stride = 1, of_part = 1;
  for (const auto dim : inner_first) {
    const auto size = local.size(dim);
    if (local.stride(dim) == 0 || (size > 1 && local.stride(dim) < of_part)) return {}; // it overlaps, or does on another rank
    if (size > 1) of_part = local.stride(dim) * size;
    strides[dim] = stride;
    if (c10::mul_overflows(stride, std::max<int64_t>(sizes[dim], 1), &stride)) return {}; // whoever takes the sizes refuses them
  }
  return strides;
}

at::Tensor alias_dtensor(const at::Tensor& dtensor) {
  auto* impl = dtensor.unsafeGetTensorImpl();
  start_view_replay();
  return at::Tensor(impl->shallow_copy_and_detach(
      impl->is_inference() ? c10::VariableVersion(c10::VariableVersion::DISABLED) : impl->version_counter(), true));
}

void word_storage_error(const at::Tensor& dtensor) {
  dtensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      no_storage("storage or data pointer", *dtensor_meta(dtensor)));
}

void become_dtensor(const at::Tensor& tensor, c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys) {
  check_local(meta->local, *meta->spec);
  const bool is_inference = tensor.is_inference();
  TORCH_CHECK(!is_inference || dtensor_meta(tensor), "a tensor made in InferenceMode cannot become a DTensor");
  start_view_replay();
  const KeepViewReplay keep;                       // which an InferenceMode switches off
  const c10::InferenceMode own_mode(is_inference); // one that is a DTensor takes another meta
  tensor.unsafeGetTensorImpl()->shallow_copy_from(make_impl(std::move(meta), extra_keys));
  word_storage_error(tensor); // which a plain tensor's class cannot do when it is asked
}

} // namespace tessera::internal
