// torch::nn's recurrent modules ask this operator of their weights, in Module::to, before they lay them out anew for cuDNN.

#include <ATen/ops/cudnn_is_acceptable_native.h>
#include <torch/library.h>

#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

/// A DTensor's weights stay where they are: what the module would move has no storage.
bool cudnn_is_acceptable(const at::Tensor& self) { return !dtensor_meta(self) && at::native::cudnn_is_acceptable(self); }

} // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("cudnn_is_acceptable", &cudnn_is_acceptable); }

} // namespace tessera::internal::dispatch
