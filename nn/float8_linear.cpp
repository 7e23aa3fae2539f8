#include <tessera/nn/float8_linear.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/operators/scaled_mm.h>

namespace tessera {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The largest number of float8_e4m3fn is 0.875 · 2⁹, that of float8_e5m2 0.875 · 2¹⁶.
constexpr double kLargestMantissa = 0.875;
constexpr double kInverseOfE4m3 = 0x1p-9, kInverseOfE5m2 = 0x1p-16;
/// Smaller numbers are scaled as this one, of which a scale and its inverse are ordinary numbers. So are zeros.
constexpr double kSmallestLargest = 0x1p-100;

/// Which numbers share a scale: all, or those along dim 0 or 1 of a matrix.
std::vector<int64_t> scaled_dims(Float8Scaling scaling, int64_t along) {
  return scaling == Float8Scaling::kTensor ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{along};
}

} // namespace

namespace internal {

at::Tensor largest_in_float8(const at::Tensor& matrix, Float8Scaling scaling, int64_t dim) {
  const auto dims = scaled_dims(scaling, dim);
  auto sizes = matrix.sizes().vec();
  for (const auto each : dims) sizes[static_cast<size_t>(each)] = 1;
  if (matrix.numel() == 0) return matrix.new_zeros(sizes, at::kFloat);
  return at::linalg_vector_norm(matrix, std::numeric_limits<double>::infinity(), dims, /*keepdim=*/true).to(at::kFloat);
}

at::Tensor float8_scale(const at::Tensor& largest, at::ScalarType dtype) {
  if (largest.is_meta()) return largest.clone(); // frexp has no kernel there
  const auto bounded = largest.clamp_min(kSmallestLargest);
  const auto mantissa = std::get<0>(at::frexp(bounded)); // in [0.5, 1)
  const double inverse = dtype == at::kFloat8_e5m2 ? kInverseOfE5m2 : kInverseOfE4m3;
  return bounded / mantissa * at::where(mantissa > kLargestMantissa, 2 * inverse, inverse);
}

} // namespace internal

namespace {

struct Codes {
  at::Tensor codes, scale;
};

/// A scale is that of the sum, beyond whose largest number a term of it may lie.
at::Tensor with_sums(const at::Tensor& matrix) {
  if (!is_dtensor(matrix)) return matrix;
  const DTensor terms(matrix);
  auto placements = terms.placements();
  if (std::none_of(placements.begin(), placements.end(), is_partial)) return matrix;
  std::replace_if(placements.begin(), placements.end(), is_partial, Replicate{});
  return terms.redistribute(placements);
}

/// `matrix` in `dtype`; with scales of rows, `along` is the dim that they have none for. A quotient by a power of two is exact
/// in bf16, which has the exponents of the scale, and takes half the bytes there.
Codes encode(const at::Tensor& matrix, at::ScalarType dtype, Float8Scaling scaling, int64_t along) {
  const auto scale = internal::float8_scale(internal::largest_in_float8(matrix, scaling, along), dtype);
  const auto divisor = matrix.scalar_type() == at::kBFloat16 ? scale.to(at::kBFloat16) : scale;
  return {(matrix / divisor).to(dtype), scale};
}

/// a [m, k] · b [k, n].
at::Tensor product(const Codes& a, const Codes& b, at::ScalarType result) {
  const auto dtype = result == at::kDouble ? at::kFloat : result;
  const bool is_distributed = is_dtensor(a.codes) || is_dtensor(b.codes);
  const auto value =
      is_distributed ? at::_scaled_mm(a.codes, b.codes, a.scale, b.scale, {}, {}, dtype)
                     : internal::scaled_mm({.a = a.codes, .b = b.codes, .a_scale = a.scale, .b_scale = b.scale, .dtype = dtype});
  return value.to(result);
}

/// The gradients of x [m, in] · wᵀ. Codes are made anew in backward: of a sharded weight nothing is kept. Each gradient brings
/// back what it needs alone: of a backward in two halves the second one gathers no weight.
struct Float8Backward final : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(!at::GradMode::is_enabled(), "float8_linear: has no second derivative: call backward without create_graph");
    variable_list of_inputs(2);
    if (!gradients[0].defined()) return of_inputs;
    const auto gradient = with_sums(gradients[0]);
    std::optional<Codes> whole; // one scale of all numbers is that of both products
    if (scaling == Float8Scaling::kTensor) whole = encode(gradient, at::kFloat8_e5m2, scaling, 1);
    const auto e4m3 = at::kFloat8_e4m3fn, e5m2 = at::kFloat8_e5m2;
    if (task_should_compute_output(0)) {
      const auto codes = whole ? *whole : encode(gradient, e5m2, scaling, 1);
      of_inputs[0] = product(codes, encode(weight.unpack(), e4m3, scaling, 0), dtype);
    }
    if (task_should_compute_output(1)) {
      const auto codes = whole ? Codes{whole->codes.t(), whole->scale} : encode(gradient.t(), e5m2, scaling, 1);
      whole.reset();
      of_inputs[1] = product(codes, encode(x.unpack(), e4m3, scaling, 0), dtype);
    }
    return of_inputs;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "Float8Backward"; }

  SavedVariable x, weight;
  at::ScalarType dtype = at::kFloat; ///< of both
  Float8Scaling scaling = Float8Scaling::kTensor;
};

/// x [m, in] · wᵀ. What backward needs is saved first: a recomputation that lacks no more ends before the product.
at::Tensor product_with_gradients(const at::Tensor& x, const at::Tensor& weight, Float8Scaling scaling) {
  std::shared_ptr<Float8Backward> node;
  if (torch::autograd::compute_requires_grad(x, weight)) {
    node = std::make_shared<Float8Backward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
    node->dtype = x.scalar_type();
    node->scaling = scaling;
    node->x = SavedVariable(x, /*is_output=*/false);
    node->weight = SavedVariable(weight, /*is_output=*/false);
  }
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result =
        product(encode(x, at::kFloat8_e4m3fn, scaling, 1), encode(weight.t(), at::kFloat8_e4m3fn, scaling, 0), x.scalar_type());
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
  auto sizes = input.sizes().vec();
  const auto numbers = with_sums(input);
  const auto rows = input.dim() == 2 ? numbers : numbers.reshape({-1, weight.size(1)});
  auto result = call_product(rows, with_sums(weight), scaling);
  sizes.back() = weight.size(0);
  if (input.dim() != 2) result = result.reshape(sizes);
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
