#include <tessera/nn/float8_linear.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/_unsafe_view.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/operators/scaled_mm.h>
#include <tessera/nn/float8_codes.h>

namespace tessera {

namespace {

using internal::as_matrix, internal::encode_float8, internal::Float8Codes, internal::gathers_float8, internal::place_of,
    internal::rows_in_float8;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// A scale is that of the sum, beyond whose largest number a term of it may lie.
at::Tensor with_sums(const at::Tensor& matrix) {
  if (!is_dtensor(matrix)) return matrix;
  const DTensor terms(matrix);
  auto placements = terms.placements();
  if (std::none_of(placements.begin(), placements.end(), is_partial)) return matrix;
  std::replace_if(placements.begin(), placements.end(), is_partial, Replicate{});
  return terms.redistribute(placements);
}

/// The sizes of `x` with another last one.
std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

/// a [m, k] · b [k, n].
at::Tensor product(const Float8Codes& a, const Float8Codes& b, at::ScalarType result) {
  const auto dtype = result == at::kDouble ? at::kFloat : result;
  const bool is_distributed = is_dtensor(a.codes) || is_dtensor(b.codes);
  const auto value =
      is_distributed ? at::_scaled_mm(a.codes, b.codes, a.scale, b.scale, {}, {}, dtype)
                     : internal::scaled_mm({.a = a.codes, .b = b.codes, .a_scale = a.scale, .b_scale = b.scale, .dtype = dtype});
  return value.to(result);
}

/// The gradients of x [.., in] · wᵀ. Codes are made anew in backward: of a sharded weight nothing is kept. Each gradient brings
/// back what it needs alone: of a backward in two halves the second one gathers no weight.
struct Float8Backward final : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(!at::GradMode::is_enabled(), "float8_linear: has no second derivative: call backward without create_graph");
    variable_list of_inputs(2);
    if (!gradients[0].defined()) return of_inputs;
    const auto gradient = with_sums(gradients[0]);
    std::optional<Float8Codes> whole; // one scale of all numbers is that of both products
    if (scaling == Float8Scaling::kTensor) whole = rows_in_float8(gradient, at::kFloat8_e5m2, scaling, 1, place);
    const auto e4m3 = at::kFloat8_e4m3fn, e5m2 = at::kFloat8_e5m2;
    if (task_should_compute_output(0)) {
      const auto codes = whole ? *whole : encode_float8(as_matrix(gradient), e5m2, scaling, 1);
      const auto matrix = weight.unpack();
      of_inputs[0] = product(codes, encode_float8(matrix, e4m3, scaling, 0), dtype);
      if (gradient.dim() != 2) of_inputs[0] = of_inputs[0].reshape(with_last(gradient, matrix.size(1)));
    }
    if (task_should_compute_output(1)) {
      const auto codes =
          whole ? Float8Codes{whole->codes.t(), whole->scale} : encode_float8(as_matrix(gradient).t(), e5m2, scaling, 1);
      whole.reset();
      of_inputs[1] = product(codes, rows_in_float8(x.unpack(), e4m3, scaling, 0, place), dtype);
    }
    return of_inputs;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "Float8Backward"; }

  SavedVariable x, weight;
  SpecPtr place;                     ///< where the weight lies
  at::ScalarType dtype = at::kFloat; ///< of both
  Float8Scaling scaling = Float8Scaling::kTensor;
};

/// x [.., in] · wᵀ. What backward needs is saved first: a recomputation that lacks no more ends before the product.
at::Tensor product_with_gradients(const at::Tensor& x, const at::Tensor& weight, Float8Scaling scaling) {
  std::shared_ptr<Float8Backward> node;
  if (torch::autograd::compute_requires_grad(x, weight)) {
    node = std::make_shared<Float8Backward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
    node->place = place_of(weight);
    node->dtype = x.scalar_type();
    node->scaling = scaling;
    node->x = SavedVariable(x, /*is_output=*/false);
    node->weight = SavedVariable(weight, /*is_output=*/false);
  }
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    const auto e4m3 = at::kFloat8_e4m3fn;
    result = product(rows_in_float8(x, e4m3, scaling, 1, place_of(weight)), encode_float8(weight.t(), e4m3, scaling, 0),
                     x.scalar_type());
    if (x.dim() != 2) result = at::_unsafe_view(result, with_last(x, weight.size(0)));
  }
  if (node) torch::autograd::set_history(result, node);
  return result;
}

/// The operator `tessera::float8_product`: what a backward in two halves sees of a layer, as it sees `mm` of others.
at::Tensor float8_product_op(const at::Tensor& x, const at::Tensor& weight, int64_t scaling) {
  return product_with_gradients(x, weight, static_cast<Float8Scaling>(scaling));
}

at::Tensor call_product(const at::Tensor& x, const at::Tensor& weight, int64_t scaling) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::float8_product", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>();
  return op.call(x, weight, scaling);
}

void check_arguments(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "float8_linear: the weight has the shape ", weight.sizes(), ", not [out, in]");
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(-1) == weight.size(1), "float8_linear: the input has the shape ", input.sizes(),
                    ", of which the last size is not the ", weight.size(1), " of the weight ", weight.sizes());
  TORCH_CHECK_TYPE(input.is_floating_point() && !at::isFloat8Type(input.scalar_type()), "float8_linear: the input is of ",
                   input.scalar_type(), ", not of floating-point numbers of 16 bits or more");
  TORCH_CHECK_TYPE(input.scalar_type() == weight.scalar_type(), "float8_linear: the input is of ", input.scalar_type(),
                   ", the weight of ", weight.scalar_type());
  TORCH_CHECK_VALUE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)),
                    "float8_linear: the bias has the shape ", bias.defined() ? bias.sizes() : at::IntArrayRef(), ", not [",
                    weight.size(0), "]");
}

at::Tensor in_float8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, int64_t scaling) {
  check_arguments(input, weight, bias);
  const auto numbers = with_sums(input), matrix = with_sums(weight);
  const bool keeps_shape = input.dim() == 2 || gathers_float8(numbers, static_cast<Float8Scaling>(scaling), place_of(matrix));
  auto result = call_product(keeps_shape ? numbers : numbers.reshape({-1, weight.size(1)}), matrix, scaling);
  if (!keeps_shape) result = result.reshape(with_last(input, weight.size(0)));
  return bias.defined() ? result + bias : result;
}

/// The operator `tessera::float8_linear`, which the dispatch of reads, tensor parallelism and autograd see as one call.
at::Tensor float8_linear_op(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            int64_t scaling) {
  const auto plain_bias = bias.value_or(at::Tensor());
  const auto device = input.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device))
    return in_float8(input, weight, plain_bias, scaling);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& tensor) {
    const bool casts = tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
    return casts ? tensor.to(dtype) : tensor;
  };
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  return in_float8(cast(input), cast(weight), cast(plain_bias), scaling);
}

} // namespace

at::Tensor float8_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, Float8Scaling scaling) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tessera::float8_linear", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t)>();
  return op.call(input, weight, bias.defined() ? std::optional(bias) : std::nullopt, static_cast<int64_t>(scaling));
}

} // namespace tessera

TORCH_LIBRARY(tessera, m) {
  m.def("float8_linear(Tensor input, Tensor weight, Tensor? bias, int scaling) -> Tensor", &tessera::float8_linear_op);
  m.def("float8_product(Tensor x, Tensor weight, int scaling) -> Tensor", &tessera::float8_product_op);
}
