#include <tessera/parallel/tensor/product_nodes.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/started_move.h>
#include <tessera/parallel/tensor/entered.h>

namespace tessera::internal::parallel {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

void save(AutogradContext* context, const ContextPtr& layer) { context->saved_data["layer"] = c10::IValue::make_capsule(layer); }
ContextPtr saved_layer(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<LayerContext>(context->saved_data["layer"].toCapsule());
}

at::Tensor rows_of(const at::Tensor& activation) { return activation.flatten(0, -2); }

/// The gradient of a weight [in, out] from this rank's parts. It lies in memory as that of a transposed weight does.
at::Tensor gradient_of_weight(const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight) {
  const auto& spec = spec_of(weight);
  const auto local = at::mm(rows_of(gradient).t(), rows_of(input)).t();
  return make_dtensor(
      local, Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), local.scalar_type(), strides_like(local, spec.sizes())));
}

/// Gradients that can be differentiated again: by operators on DTensors, one after another.
variable_list differentiable_gradients(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight) {
  return {at::matmul(gradient, weight.t()), at::matmul(rows_of(input).t(), rows_of(gradient))};
}

/// x · w of an activation that was gathered meanwhile.
struct GatherAndMultiply : torch::autograd::Function<GatherAndMultiply> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& whole, const at::Tensor& weight,
                            const at::Tensor& product, const ContextPtr& layer) {
    layer->input = SavedVariable(whole, /*is_output=*/false);
    context->save_for_backward({weight});
    save(context, layer);
    return alias_dtensor(product);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto layer = saved_layer(context);
    const auto weight = context->get_saved_variables()[0];
    const auto given = gradient_as_dtensor(gradients[0], *layer->result, layer->label.c_str());
    const auto gradient = differentiable_move(given, layer->result->mesh(), layer->result->placements(), layer->label.c_str());
    const InsideLayer inside;
    auto result = at::GradMode::is_enabled() ? differentiable_gradients(gradient, layer->input.unpack(), weight)
                                             : gradients_of(*context, *layer, gradient, weight);
    if (!torch::autograd::get_current_graph_task_keep_graph()) layer->input.reset_data();
    result.resize(4);
    return result;
  }

  /// The activation is gathered again beside the product for its gradient, and that is reduced beside the one for the weight's.
  static variable_list gradients_of(AutogradContext& context, LayerContext& layer, const at::Tensor& gradient,
                                    const at::Tensor& weight) {
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    if (context.needs_input_grad(1) && layer.gathered) start_gathering_again(*layer.gathered);
    const auto local = dtensor_meta(gradient)->local;
    at::Tensor of_input, of_weight;
    std::optional<StartedMove> reduced;
    if (context.needs_input_grad(0)) {
      const auto sum = spec_like(*layer.source, Partial{}, weight.size(0));
      of_input = make_dtensor(at::matmul(local, meta_of(weight, layer.label.c_str()).local.t()), sum);
      // Of several readers autograd adds the sums first, and reduces once.
      if (*layer.readers == 1) reduced.emplace(std::exchange(of_input, {}), layer.source->placements(), layer.label);
    }
    if (context.needs_input_grad(1)) {
      const auto whole = layer.input.unpack();
      of_weight = gradient_of_weight(dtensor_meta(whole)->local, local, weight);
    }
    if (reduced) of_input = reduced->finish();
    return {of_input, of_weight};
  }
};

/// This rank's positions of the sum of all x · w.
struct MultiplyAndScatter : torch::autograd::Function<MultiplyAndScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& sum,
                            const ContextPtr& layer) {
    context->save_for_backward({input, weight});
    save(context, layer);
    return alias_dtensor(sum);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto layer = saved_layer(context);
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto given = gradient_as_dtensor(gradients[0], *layer->result, layer->label.c_str());
    const InsideLayer inside;
    auto result = at::GradMode::is_enabled()
                      ? differentiable_gradients(
                            differentiable_move(given, layer->result->mesh(), {Replicate{}}, layer->label.c_str()), input, weight)
                      : gradients_of(*context, *layer, given, input, weight);
    result.resize(4);
    return result;
  }

  /// The gradient is gathered beside the product for that of the activation.
  static variable_list gradients_of(AutogradContext& context, const LayerContext& layer, const at::Tensor& given,
                                    const at::Tensor& input, const at::Tensor& weight) {
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const auto back = meta_of(weight, layer.label.c_str()).local.t();
    at::Tensor whole, product, of_input, of_weight;
    if (context.needs_input_grad(0) && placement_of(given) == layer.result->placements()[0]) {
      auto gathered = gather_parts(given, back, layer.chunks, layer.label);
      whole = std::move(gathered.whole);
      product = std::move(gathered.product);
    } else {
      whole = dtensor_meta(move(given, {Replicate{}}, layer.label.c_str()))->local;
      if (context.needs_input_grad(0)) product = at::matmul(whole, back);
    }
    if (product.defined()) of_input = make_dtensor(product, spec_like(spec_of(input), placement_of(input), input.size(-1)));
    if (context.needs_input_grad(1)) of_weight = gradient_of_weight(dtensor_meta(input)->local, whole, weight);
    return {of_input, of_weight};
  }
};

} // namespace

std::optional<int64_t> sequence_dim(const Placement& placement, int64_t ndim) {
  const auto* shard = std::get_if<Shard>(&placement);
  const bool splits = shard && shard->dim >= 0 && shard->dim < ndim - 1;
  return splits ? std::optional(shard->dim) : std::nullopt;
}

SpecPtr spec_like(const Spec& like, const Placement& placement, int64_t features) {
  auto sizes = like.sizes();
  sizes.back() = features;
  return Spec::intern(like.mesh(), {placement}, std::move(sizes), like.dtype());
}

GatheredProduct gather_parts(const at::Tensor& part, const at::Tensor& weight, int64_t chunks, const std::string& label) {
  const auto& spec = spec_of(part);
  const auto dim = *sequence_dim(placement_of(part), part.dim());
  return noted(label, spec, Replicate{}, [&] {
    return gather_product(dtensor_meta(part)->local, weight, {spec.mesh(), dim, part.size(dim), chunks}, label);
  });
}

at::Tensor gathered_in_graph(const at::Tensor& whole, const at::Tensor& weight, const at::Tensor& product,
                             const ContextPtr& layer) {
  return GatherAndMultiply::apply(whole, weight, product, layer);
}

at::Tensor scattered_in_graph(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& sum, const ContextPtr& layer) {
  return MultiplyAndScatter::apply(input, weight, sum, layer);
}

} // namespace tessera::internal::parallel
