#include <tessera/dtensor/dispatch/split_loss.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/redistribute/move.h>

namespace tessera::internal::dispatch {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kClasses = 1;

/// Arguments of cross_entropy_loss by position.
enum Position : size_t { kSelf, kTarget, kWeight, kReduction, kIgnore, kSmoothing };

bool is_counted_once(const at::Tensor& target, const Spec& self) {
  const auto* meta = dtensor_meta(target);
  if (!meta) return is_planned(self.mesh());
  const auto& placements = meta->spec->placements();
  return meta->spec->mesh() == self.mesh() && std::none_of(placements.begin(), placements.end(), is_partial);
}

struct SplitCrossEntropy : torch::autograd::Function<SplitCrossEntropy> {
  /// The loss, and the logarithms of the probabilities: as a result of this node they lead on to it in a second derivative.
  static variable_list forward(AutogradContext* context, const at::Tensor& self, const at::Tensor& target, int64_t reduction,
                               int64_t ignored) {
    const auto logarithms = at::log_softmax(self, kClasses);
    const auto [loss, total] = at::nll_loss_forward(logarithms, target, {}, reduction, ignored);
    context->save_for_backward({logarithms, target, total});
    context->saved_data["reduction"] = reduction;
    context->saved_data["ignored"] = ignored;
    context->set_materialize_grads(false);
    return {loss, logarithms};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &logarithms = saved[0], &target = saved[1], &total = saved[2];
    at::Tensor result;
    if (gradients[0].defined()) {
      const auto reduction = context->saved_data["reduction"].toInt(), ignored = context->saved_data["ignored"].toInt();
      const auto gradient = gradient_as_dtensor(gradients[0], *dtensor_meta(logarithms)->spec, "cross_entropy_loss");
      const auto picked = at::nll_loss_backward(gradient, logarithms, target, {}, reduction, ignored, total);
      auto rows = target.ne(ignored).to(logarithms.scalar_type()) * gradient; // minus what `picked` sums up to over the classes
      if (reduction == at::Reduction::Mean) rows = rows / total;
      result = picked + logarithms.exp() * rows.unsqueeze(kClasses);
    }
    if (gradients[1].defined()) {
      const auto of_logarithms = at::_log_softmax_backward_data(gradients[1], logarithms, kClasses, logarithms.scalar_type());
      result = result.defined() ? result + of_logarithms : of_logarithms;
    }
    return {result, {}, {}, {}};
  }
};

} // namespace

bool serves_split_cross_entropy(c10::ArrayRef<c10::IValue> arguments) {
  const auto &self = arguments[kSelf].toTensor(), &target = arguments[kTarget].toTensor();
  const auto* meta = dtensor_meta(self);
  if (!meta || self.dim() != 2 || !needs_graph(self)) return false;
  if (self.scalar_type() != at::kFloat && self.scalar_type() != at::kDouble) return false;
  const auto is_split = [](const Placement& placement) { return shards_dim(placement, kClasses); };
  const auto& placements = meta->spec->placements();
  const bool splits_classes = std::any_of(placements.begin(), placements.end(), is_split);
  const bool is_weighted = arguments[kWeight].isTensor() && arguments[kWeight].toTensor().defined();
  return splits_classes && !is_weighted && arguments[kSmoothing].toDouble() == 0 && target.dim() == 1 &&
         target.scalar_type() == at::kLong && target.size(0) == self.size(0) && is_counted_once(target, *meta->spec);
}

at::Tensor split_cross_entropy(c10::ArrayRef<c10::IValue> arguments) {
  const auto& self = arguments[kSelf].toTensor();
  auto target = arguments[kTarget].toTensor();
  const auto& mesh = dtensor_meta(self)->spec->mesh();
  if (!is_dtensor(target)) target = from_local(target, mesh, Placements(static_cast<size_t>(mesh.ndim())));
  return SplitCrossEntropy::apply(self, target, arguments[kReduction].toInt(), arguments[kIgnore].toInt())[0];
}

} // namespace tessera::internal::dispatch
