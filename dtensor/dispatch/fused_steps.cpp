// Fused steps of optimizers on DTensors. Optimizers call them with every parameter of a model: a plan, or boxing the lists, would
// cost more than the step.

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/dtensor/dispatch/fallback.h>
#include <tessera/dtensor/tensor/count_write.h>
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

/// The kernel reads flat memory: a part that has other strides than the parameter's is a copy while it lives.
class Restrided {
 public:
  explicit Restrided(std::vector<std::vector<at::Tensor>>& parts) {
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

/// `step` on the parts, where the lists are aligned with the first one and the numbers of steps are plain. The step writes all
/// lists but the gradients, which are the second.
template <typename Step> // void(parts of the lists)
bool step_on_parts(std::initializer_list<at::TensorList> lists, at::TensorList steps, const Step& step) {
  std::vector<std::vector<at::Tensor>> parts;
  for (const auto& list : lists) {
    auto aligned = aligned_parts(list, *lists.begin());
    if (!aligned) return false;
    parts.push_back(std::move(*aligned));
  }
  const auto plain = [](const at::Tensor& tensor) { return dtensor_meta(tensor) == nullptr && tensor.dim() == 0; };
  if (!std::all_of(steps.begin(), steps.end(), plain)) return false;
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                 c10::DispatchKeySet(kDTensorKey));
  const Restrided restrided(parts);
  step(parts);
  restrided.copy_back();
  for (size_t i = 0; i < lists.size(); ++i) {
    if (i == 1) continue;
    for (const auto& written : lists.begin()[i]) count_write(written);
  }
  return true;
}

/// What no kernel of the parts takes goes through a plan.
template <typename Op, typename... Arguments>
void step_by_plan(const Arguments&... arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  auto stack = c10::impl::boxArgs(arguments...);
  run(op, c10::DispatchKeySet(), &stack);
}

using Scale = std::optional<at::Tensor>;

bool is_simple(const Scale& grad_scale, const Scale& found_inf) {
  return !at::GradMode::is_enabled() && !grad_scale && !found_inf;
}

template <typename Op>
void fused_adam(at::TensorList parameters, at::TensorList gradients, at::TensorList averages, at::TensorList squares,
                at::TensorList max_squares, at::TensorList steps, double lr, double beta1, double beta2, double weight_decay,
                double eps, bool amsgrad, bool maximize, const Scale& grad_scale, const Scale& found_inf) {
  const auto step = [&](const auto& parts) {
    Op::call(parts[0], parts[1], parts[2], parts[3], parts[4], steps, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
             std::nullopt, std::nullopt);
  };
  if (is_simple(grad_scale, found_inf) && step_on_parts({parameters, gradients, averages, squares, max_squares}, steps, step))
    return;
  step_by_plan<Op>(parameters, gradients, averages, squares, max_squares, steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
                   maximize, grad_scale, found_inf);
}

void fused_sgd(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta, double weight_decay, double momentum,
               double lr, double dampening, bool nesterov, bool maximize, bool is_first_step, const Scale& grad_scale,
               const Scale& found_inf) {
  using Op = at::_ops::_fused_sgd_;
  const auto step = [&](const auto& parts) {
    Op::call(parts[0], parts[1], parts[2], weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, std::nullopt,
             std::nullopt);
  };
  if (is_simple(grad_scale, found_inf) && step_on_parts({parameters, gradients, momenta}, {}, step)) return;
  step_by_plan<Op>(parameters, gradients, momenta, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
                   grad_scale, found_inf);
}

void fused_adagrad(at::TensorList parameters, at::TensorList gradients, at::TensorList sums, at::TensorList steps, double lr,
                   double lr_decay, double weight_decay, double eps, bool maximize, const Scale& grad_scale,
                   const Scale& found_inf) {
  using Op = at::_ops::_fused_adagrad_;
  const auto step = [&](const auto& parts) {
    Op::call(parts[0], parts[1], parts[2], steps, lr, lr_decay, weight_decay, eps, maximize, std::nullopt, std::nullopt);
  };
  if (is_simple(grad_scale, found_inf) && step_on_parts({parameters, gradients, sums}, steps, step)) return;
  step_by_plan<Op>(parameters, gradients, sums, steps, lr, lr_decay, weight_decay, eps, maximize, grad_scale, found_inf);
}

} // namespace

} // namespace tessera::internal::dispatch

TORCH_LIBRARY_IMPL(aten, Fake, m) {
  m.impl("_fused_adam_", &tessera::internal::dispatch::fused_adam<at::_ops::_fused_adam_>);
  m.impl("_fused_adamw_", &tessera::internal::dispatch::fused_adam<at::_ops::_fused_adamw_>);
  m.impl("_fused_sgd_", &tessera::internal::dispatch::fused_sgd);
  m.impl("_fused_adagrad_", &tessera::internal::dispatch::fused_adagrad);
}
