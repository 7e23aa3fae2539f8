#include <tessera/dtensor/dtensor_impl.h>

#include <absl/algorithm/container.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <tessera/dtensor/in_backward.h>
#include <tessera/dtensor/view_replay.h>

namespace tessera::internal {

namespace {

const std::string kNoStorage =
    "a DTensor has no storage of its own: its data is spread over the ranks of its mesh. Use to_local() for this rank's part, "
    "full_tensor() for the whole, tessera::to_string() to print it and tessera::checkpoint::save() to save it";
const std::string kNoStorageBrief = "use to_local()"; // of the 15 characters that a string has room for in itself

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
  using TensorImpl::TensorImpl;

  const c10::Storage& storage() const override {
    const bool may_be_engine = !device().is_cpu() && in_backward();
    if (!may_be_engine || !key_set().has(kDTensorKey)) return TensorImpl::storage(); // or it was made whole
    return static_cast<const DTensorMeta&>(*get_backend_meta_intrusive_ptr()).local.storage();
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    auto copy = c10::make_intrusive<DTensorImpl>(key_set(), dtype(), device());
    copy_tensor_metadata(this, copy.get(), version_counter, allow_tensor_metadata_change);
    return copy;
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override {
    return shallow_copy_and_detach(std::as_const(version_counter), allow_tensor_metadata_change);
  }
};

c10::intrusive_ptr<c10::TensorImpl> make_impl(c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys,
                                              StorageError error) {
  start_view_replay();
  const auto& local = meta->local;
  const c10::DispatchKeySet backend(backend_key(local.device().type()));
  auto impl =
      c10::make_intrusive<DTensorImpl>(backend | c10::DispatchKeySet(kDTensorKey) | extra_keys, local.dtype(), local.device());
  impl->set_sizes_and_strides(meta->spec->sizes(), meta->spec->strides());
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(error == StorageError::kBrief ? kNoStorageBrief : kNoStorage);
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

at::Tensor make_dtensor(at::Tensor local, SpecPtr spec) {
  return make_dtensor(c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
}

at::Tensor make_dtensor(c10::intrusive_ptr<DTensorMeta> meta, StorageError error) {
  check_local(meta->local, *meta->spec);
  return at::Tensor(make_impl(std::move(meta), {}, error));
}

std::vector<int64_t> strides_like(const at::Tensor& local, c10::IntArrayRef sizes) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (local.dim() != ndim || local.is_contiguous()) return {};
  std::vector<int64_t> inner_first(ndim), strides(ndim);
  std::iota(inner_first.rbegin(), inner_first.rend(), 0);
  // Of two dims with one stride, that of a single element is the inner one.
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

void become_dtensor(const at::Tensor& tensor, c10::intrusive_ptr<DTensorMeta> meta, c10::DispatchKeySet extra_keys) {
  check_local(meta->local, *meta->spec);
  TORCH_CHECK(!tensor.is_inference(), "a tensor made in InferenceMode cannot become a DTensor");
  start_view_replay();
  const KeepViewReplay keep; // which an InferenceMode switches off
  const c10::InferenceMode normal_mode(false);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(make_impl(std::move(meta), extra_keys, StorageError::kInFull));
}

} // namespace tessera::internal
