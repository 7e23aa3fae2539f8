// Fused Adam steps on DTensors. Optimizers call them with every parameter of a model: a plan, or boxing the lists, would cost
// more than the step.

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/dtensor/dispatch/fallback.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/prefetch.h>

namespace tessera::internal::dispatch {

namespace {

/// Prefetches what `aligned_parts` reads a few positions later.
void prefetch_ahead(at::TensorList tensors, size_t position) {
  constexpr size_t kAhead = 8;
  if (position + 2 * kAhead < tensors.size()) prefetch(tensors[position + 2 * kAhead].unsafeGetTensorImpl());
  if (position + kAhead < tensors.size()) prefetch(dtensor_meta(tensors[position + kAhead]));
}

/// The parts of a list of DTensors that lie as those of `like` do, position by position, so that what is done to the parts is
/// done to the tensors. Nothing where they do not, where one is Partial or a copy of another's data, or this rank is outside the
/// mesh.
std::optional<std::vector<at::Tensor>> aligned_parts(at::TensorList tensors, at::TensorList like) {
  std::vector<at::Tensor> parts;
  if (tensors.empty()) return parts;
  if (tensors.size() != like.size()) return std::nullopt;
  parts.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    prefetch_ahead(tensors, i);
    const auto *meta = dtensor_meta(tensors[i]), *other = dtensor_meta(like[i]);
    const bool aligned = meta && other && meta->spec == other->spec && !meta->copied_at_version && !meta->spec->has_partial();
    if (!aligned || !meta->spec->on_mesh()) return std::nullopt;
    parts.push_back(meta->local);
  }
  return parts;
}

/// The kernel runs below the level that counts versions, and that notes what state becomes that was made as zeros.
void count_writes(at::TensorList list) {
  for (const auto& each : list) {
    auto* meta = dtensor_meta(each);
    if (meta->provenance.computed) meta->provenance.whole_dtype.reset();
    for (const at::Tensor* tensor : {&each, &std::as_const(meta->local)}) {
      if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
    }
  }
}

/// The kernel reads flat memory: a part that has other strides than the parameter's is a copy while it lives.
class Restrided {
 public:
  Restrided(std::array<std::vector<at::Tensor>, 5>& parts) {
    for (size_t list = 1; list < parts.size(); ++list) {
      for (size_t i = 0; i < parts[list].size(); ++i) {
        auto& part = parts[list][i];
        const auto& like = parts[0][i];
        if (C10_LIKELY(part.strides() == like.strides())) continue;
        copies_.emplace_back(part, at::empty_strided(like.sizes(), like.strides(), part.options()).copy_(part));
        part = copies_.back().second;
      }
    }
  }
  void copy_back() const {
    for (const auto& [part, copy] : copies_) part.copy_(copy);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

/// Steps on the parts where the lists are aligned and the numbers of steps are plain.
template <typename Op>
bool step_on_parts(const std::array<at::TensorList, 5>& lists, at::TensorList steps, double lr, double beta1, double beta2,
                   double weight_decay, double eps, bool amsgrad, bool maximize) {
  std::array<std::vector<at::Tensor>, 5> parts;
  for (size_t i = 0; i < lists.size(); ++i) {
    auto list = aligned_parts(lists[i], lists[0]);
    if (!list) return false;
    parts[i] = std::move(*list);
  }
  const auto plain = [](const at::Tensor& tensor) { return dtensor_meta(tensor) == nullptr && tensor.dim() == 0; };
  if (!std::all_of(steps.begin(), steps.end(), plain)) return false;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kDTensorKey));
  const Restrided restrided(parts);
  Op::call(parts[0], parts[1], parts[2], parts[3], parts[4], steps, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
           std::nullopt, std::nullopt);
  restrided.copy_back();
  for (const size_t written : {0, 2, 3, 4}) count_writes(lists[written]);
  return true;
}

template <typename Op>
void fused_adam(at::TensorList parameters, at::TensorList gradients, at::TensorList averages, at::TensorList squares,
                at::TensorList max_squares, at::TensorList steps, double lr, double beta1, double beta2, double weight_decay,
                double eps, bool amsgrad, bool maximize, const std::optional<at::Tensor>& grad_scale,
                const std::optional<at::Tensor>& found_inf) {
  const bool simple = !at::GradMode::is_enabled() && !grad_scale && !found_inf;
  if (simple && step_on_parts<Op>({parameters, gradients, averages, squares, max_squares}, steps, lr, beta1, beta2, weight_decay,
                                  eps, amsgrad, maximize)) {
    return;
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  auto stack = c10::impl::boxArgs(parameters, gradients, averages, squares, max_squares, steps, lr, beta1, beta2, weight_decay,
                                  eps, amsgrad, maximize, grad_scale, found_inf);
  run(op, c10::DispatchKeySet(), &stack);
}

} // namespace

} // namespace tessera::internal::dispatch

TORCH_LIBRARY_IMPL(aten, Fake, m) {
  m.impl("_fused_adam_", &tessera::internal::dispatch::fused_adam<at::_ops::_fused_adam_>);
  m.impl("_fused_adamw_", &tessera::internal::dispatch::fused_adam<at::_ops::_fused_adamw_>);
}
