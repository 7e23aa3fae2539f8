#include <tessera/plan/shapes/meta_library.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/empty.h>

namespace tessera::internal::shapes {

namespace {

bool is_reduced(int64_t reduction) { return reduction != at::Reduction::None; }

Tensor mse_backward(const Tensor&, const Tensor& self, const Tensor&, int64_t) { return empty_of(self, self.sizes()); }

Tensor binary_cross_entropy(const Tensor& self, const Tensor&, const MaybeTensor&, int64_t reduction) {
  const auto losses = empty_of(self, self.sizes());
  return is_reduced(reduction) ? empty_of(self, {}) : losses;
}
Tensor binary_cross_entropy_backward(const Tensor&, const Tensor& self, const Tensor&, const MaybeTensor&, int64_t) {
  return empty_of(self, self.sizes());
}

Tensor huber(const Tensor& self, const Tensor& target, int64_t reduction, double) {
  auto losses = elementwise({self, target});
  return is_reduced(reduction) ? empty_of(losses, {}) : losses;
}

/// The loss of pictures [batch, classes, height, width].
Two nll2d(const Tensor& self, const Tensor&, const MaybeTensor&, int64_t reduction, int64_t) {
  auto loss = is_reduced(reduction) ? empty_of(self, {}) : empty_of(self, {self.size(0), self.size(2), self.size(3)});
  return {std::move(loss), empty_of(self, {})};
}
Tensor nll2d_backward(const Tensor&, const Tensor& self, const Tensor&, const MaybeTensor&, int64_t, int64_t, const Tensor&) {
  return empty_of(self, self.sizes());
}

} // namespace

void add_losses(MetaLibrary& library) {
  library.add("mse_loss_backward", mse_backward);
  library.add("binary_cross_entropy", binary_cross_entropy);
  library.add("binary_cross_entropy_backward", binary_cross_entropy_backward);
  library.add("huber_loss", huber);
  library.add("nll_loss2d_forward", nll2d);
  library.add("nll_loss2d_backward", nll2d_backward);
}

} // namespace tessera::internal::shapes
