#include <tessera/nn/sync_batch_norm.h>

#include <ATen/ops/_has_compatible_shallow_copy_type.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/nn/batch_statistics.h>
#include <tessera/nn/follow_scripts.h>

namespace tessera {

namespace internal {

namespace {

/// A key above autograd that LibTorch gives no tensor, on the running mean of a converted module: at::batch_norm comes here
/// first. All other operators fall through it.
constexpr c10::DispatchKey kSyncKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct SyncMeta : c10::BackendMeta {
  SyncMeta(BatchRanks of, int64_t features, bool is_tracked) : ranks(std::move(of)), channels(features), tracks(is_tracked) {}
  BatchRanks ranks;
  int64_t channels;
  bool tracks; ///< false: the tensor stands in the place of running statistics that the module does not have
};
using SyncMetaPtr = c10::intrusive_ptr<SyncMeta>;

/// Null for any other tensor, and for a view, which has the key alone.
SyncMeta* sync_meta(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kSyncKey)) return nullptr;
  return static_cast<SyncMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// In place: every holder of the tensor stays, as do its memory and its version counter.
void attach(const at::Tensor& tensor, SyncMetaPtr meta) {
  const c10::InferenceMode normal_mode(false);
  const auto keys = tensor.key_set().add(kSyncKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_backend_meta(std::move(meta));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(impl);
}

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

at::Tensor sync_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                           const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps,
                           bool cudnn_enabled) {
  const c10::impl::ExcludeDispatchKeyGuard below(kSyncKey);
  const auto* meta = sync_meta(or_undefined(running_mean));
  if (!meta) return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
  BatchNormArguments arguments{meta->channels, or_undefined(weight), or_undefined(bias), {}, {}, training, momentum, eps};
  if (meta->tracks) {
    arguments.running_mean = *running_mean;
    arguments.running_var = or_undefined(running_var);
  }
  return batch_norm_over(meta->ranks, input, arguments);
}

/// The only dispatched step of Tensor::set_data, by which Module::to gives a buffer other contents and other keys.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const c10::impl::ExcludeDispatchKeyGuard below(kSyncKey);
  const bool is_compatible = at::_has_compatible_shallow_copy_type(self, from);
  if (is_compatible) keep_synchronized(self, from);
  return is_compatible;
}

void check_running_mean(const at::Tensor& mean, const std::string& name) {
  TORCH_CHECK_VALUE(!dtensor_meta(mean), "convert_sync_batch_norm: the running_mean of ", name, " is a DTensor");
  TORCH_CHECK_VALUE(!mean.is_inference(), "convert_sync_batch_norm: the running_mean of ", name,
                    " was made in InferenceMode; build the module outside of it");
}

/// What a module of any number of dims has to be told: the running mean carries it.
template <typename Norm>
void synchronize(Norm& norm, const std::string& name, const BatchRanks& ranks) {
  const bool tracks = norm.options.track_running_stats();
  if (!tracks) norm.running_mean = at::empty({0}); // a member alone, which nothing registers
  const auto& mean = norm.running_mean;
  TORCH_CHECK_VALUE(mean.defined(), "convert_sync_batch_norm: the module ", name, " has no running_mean, though it tracks it");
  check_running_mean(mean, name);
  attach(mean, c10::make_intrusive<SyncMeta>(ranks, norm.options.num_features(), tracks));
}

/// A script calls the same operator.
bool synchronize_if_scripted(const torch::nn::Module& module, const std::string& name, const BatchRanks& ranks) {
  if (!is_scripted_batch_norm(module)) return false;
  const auto mean = running_mean_of_script(module);
  TORCH_CHECK_VALUE(mean.defined(), "convert_sync_batch_norm: the module ", name,
                    " of a script has no running statistics, which carry its ranks: export it with track_running_stats=True");
  check_running_mean(mean, name);
  attach(mean, c10::make_intrusive<SyncMeta>(ranks, mean.numel(), /*tracks=*/true));
  return true;
}

template <typename Norm>
bool synchronize_if(torch::nn::Module& module, const std::string& name, const BatchRanks& ranks) {
  auto* norm = module.as<Norm>();
  if (norm) synchronize(*norm, name, ranks);
  return norm != nullptr;
}

} // namespace

bool is_synchronized(const at::Tensor& running_mean) { return sync_meta(running_mean) != nullptr; }

void keep_synchronized(const at::Tensor& from, const at::Tensor& to) {
  if (auto* meta = sync_meta(from)) attach(to, SyncMetaPtr::reclaim_copy(meta));
}

} // namespace internal

std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, const DeviceMesh& mesh) {
  using torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl;
  auto ranks = internal::batch_ranks(mesh, "", "convert_sync_batch_norm");
  std::vector<std::string> names;
  const auto visit = [&](const std::string& path, torch::nn::Module& at) {
    ranks.label = path.empty() ? at.name() : path;
    const bool converts = internal::synchronize_if<BatchNorm1dImpl>(at, ranks.label, ranks) ||
                          internal::synchronize_if<BatchNorm2dImpl>(at, ranks.label, ranks) ||
                          internal::synchronize_if<BatchNorm3dImpl>(at, ranks.label, ranks) ||
                          internal::synchronize_if_scripted(at, ranks.label, ranks);
    if (converts) names.push_back(path);
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) visit(item.key(), *item.value());
  return names;
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const DeviceMesh& mesh)
    : NormImplBase(options), mesh_(mesh), communicator_(internal::batch_ranks(mesh, "", "SyncBatchNorm").communicator) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  const bool counts = is_training() && options.track_running_stats();
  double momentum = options.momentum().value_or(0);
  if (counts && !options.momentum()) momentum = 1 / (num_batches_tracked.item<double>() + 1); // the mean of all batches
  const bool uses_batch = is_training() || !options.track_running_stats();
  auto output = internal::batch_norm_over(
      {communicator_, "SyncBatchNorm"}, input,
      {options.num_features(), weight, bias, running_mean, running_var, uses_batch, momentum, options.eps()});
  if (counts) num_batches_tracked += 1;
  return output;
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "tessera::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ", momentum=";
  options.momentum() ? stream << *options.momentum() : stream << "None";
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats() << ", "
         << mesh_.to_string() << ')';
}

} // namespace tessera

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("batch_norm", &tessera::internal::sync_batch_norm);
  m.impl("_has_compatible_shallow_copy_type", &tessera::internal::has_compatible_shallow_copy_type);
}
