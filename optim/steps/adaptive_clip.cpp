#include <tessera/optim/adaptive_clip.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>

namespace tessera {

namespace {

using internal::Piece;

/// The units of a parameter: its rows, or one.
int64_t units_of(const at::Tensor& parameter) { return parameter.dim() > 1 ? parameter.size(0) : 1; }

/// The units that a piece has elements of.
at::Tensor units_in(const at::Tensor& units, const Piece& piece) {
  return piece.data.dim() > 1 ? units.narrow(0, piece.box.offsets[0], piece.box.sizes[0]) : units;
}

std::vector<int64_t> dims_of_unit(const at::Tensor& data) {
  std::vector<int64_t> dims;
  for (int64_t d = data.dim() > 1 ? 1 : 0; d < data.dim(); ++d) dims.push_back(d);
  return dims;
}

/// This rank's share of the squared norms of the units.
at::Tensor own_squares(const at::Tensor& tensor) {
  const auto part = internal::part_of(tensor);
  const auto squares = at::zeros({units_of(tensor)}, part.options().dtype(at::kDouble));
  for (const auto& piece : internal::pieces_like(tensor, part.contiguous())) {
    const auto dims = dims_of_unit(piece.data);
    const auto values = piece.data.to(at::kDouble).square();
    units_in(squares, piece).add_(dims.empty() ? values : values.sum(dims));
  }
  return squares;
}

/// Multiplies each unit of this rank's part by its factor.
void scale(const at::Tensor& gradient, const at::Tensor& factors) {
  const auto part = internal::part_of(gradient), values = part.contiguous();
  for (const auto& piece : internal::pieces_like(gradient, values)) {
    std::vector<int64_t> shape(static_cast<size_t>(piece.data.dim()), 1);
    if (piece.data.dim() > 1) shape[0] = piece.box.sizes[0];
    piece.data.mul_(units_in(factors, piece).view(shape).to(piece.data.scalar_type()));
  }
  if (!values.is_same(part)) part.copy_(values);
}

/// The gradient, which lies as the parameter does from now on.
at::Tensor placed_gradient(const at::Tensor& parameter) {
  auto gradient = internal::aligned_gradient(parameter);
  if (!gradient.is_same(parameter.grad())) parameter.mutable_grad() = gradient;
  return gradient;
}

/// 1 where the gradient of a unit is within its limit.
at::Tensor factors_of(const at::Tensor& parameter_squares, const at::Tensor& gradient_squares, double clip_factor, double eps) {
  constexpr double kLeast = 1e-6; // as the authors have it
  const auto limit = parameter_squares.sqrt().clamp_min(eps).mul(clip_factor), norm = gradient_squares.sqrt();
  return at::where(norm.gt(limit), limit.div(norm.clamp_min(kLeast)), at::ones({}, norm.options()));
}

} // namespace

// NOLINTNEXTLINE(readability-identifier-naming)
void clip_grad_adaptive_(const std::vector<at::Tensor>& parameters, double clip_factor, double eps) {
  TORCH_CHECK_VALUE(clip_factor > 0, "clip_grad_adaptive_: clip_factor is ", clip_factor, "; it must be positive");
  TORCH_CHECK_VALUE(eps > 0, "clip_grad_adaptive_: eps is ", eps, "; it must be positive");
  const at::NoGradGuard no_grad;
  absl::flat_hash_set<const c10::TensorImpl*> listed;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<internal::ShareOfSums> shares;
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined() || !listed.insert(parameter.unsafeGetTensorImpl()).second) continue;
    pairs.emplace_back(parameter, placed_gradient(parameter));
    const auto& [own, gradient] = pairs.back();
    shares.push_back({own, own_squares(own)});
    shares.push_back({gradient, own_squares(gradient)});
  }
  const auto squares = internal::shared_sums(shares, "the units of clip_grad_adaptive_");
  for (size_t i = 0; i < pairs.size(); ++i)
    scale(pairs[i].second, factors_of(squares[2 * i], squares[2 * i + 1], clip_factor, eps));
}

} // namespace tessera
