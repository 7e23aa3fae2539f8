// fill_diagonal_ of a DTensor. PyTorch's kernel writes through a stride that parts do not have; here it is a write at the
// positions of the diagonal, of which each rank keeps its own.

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/fill_diagonal_native.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

c10::List<std::optional<at::Tensor>> positions_of_diagonal(const at::Tensor& tensor, bool wrap) {
  const auto sizes = tensor.sizes();
  const auto options = tensor.options().dtype(at::kLong);
  c10::List<std::optional<at::Tensor>> positions;
  if (wrap && sizes.size() == 2 && sizes[0] > sizes[1] + 1) { // it starts again a row below its end
    const auto step = sizes[1] + 1;
    const auto flat = at::arange(0, sizes[0] * sizes[1], step, options);
    positions.push_back(flat.div(sizes[1], "floor"));
    positions.push_back(flat.remainder(sizes[1]));
  } else {
    const auto diagonal = at::arange(*std::min_element(sizes.begin(), sizes.end()), options);
    positions.resize(sizes.size(), diagonal);
  }
  return positions;
}

at::Tensor& fill_diagonal(at::Tensor& self, const at::Scalar& value, bool wrap) {
  if (!dtensor_meta(self)) return at::native::fill_diagonal_(self, value, wrap);
  auto like = at::empty(self.sizes(), self.options().device(at::kMeta));
  at::native::fill_diagonal_(like, value, wrap); // which checks the shape
  if (self.numel() == 0) return self;
  return self.index_put_(positions_of_diagonal(self, wrap), at::full({}, value, self.options()));
}

void add_kernel(torch::Library& library) { library.impl("fill_diagonal_", &fill_diagonal); }

} // namespace

} // namespace tessera::internal::dispatch

// In front of the composite kernel; under InferenceMode a tensor may have no key of autograd.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { tessera::internal::dispatch::add_kernel(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { tessera::internal::dispatch::add_kernel(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { tessera::internal::dispatch::add_kernel(library); }
TORCH_LIBRARY_IMPL(aten, Fake, library) { tessera::internal::dispatch::add_kernel(library); }
