#include <tessera/dtensor/operators/scaled_mm.h>

#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <tessera/base/meta_device.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal {

namespace {

/// What kernels of GPUs want sizes to be multiples of.
constexpr int64_t kAlignment = 16;

int64_t missing(int64_t size) { return at::round_up(size, kAlignment) - size; }

at::Tensor padded(const at::Tensor& matrix, int64_t rows, int64_t columns) {
  if (rows == 0 && columns == 0) return matrix;
  return at::constant_pad_nd(matrix.view(at::kByte), {0, columns, 0, rows}).view(matrix.scalar_type()); // no kernel pads fp8
}

at::Tensor run_kernel(const ScaledProduct& product) {
  const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return at::_scaled_mm(product.a, product.b, product.a_scale, product.b_scale, optional(product.bias),
                        optional(product.result_scale), product.dtype, product.fast_accumulation);
}

/// The product of the codes in fp32, scaled by row and column afterwards.
at::Tensor scale_afterwards(const ScaledProduct& product) {
  const auto one = at::ones({}, product.a_scale.options());
  auto result = scaled_mm({.a = product.a, .b = product.b, .a_scale = one, .b_scale = one});
  result.mul_(product.a_scale).mul_(product.b_scale);
  if (product.bias.defined()) result.add_(product.bias);
  return result.to(product.dtype);
}

/// Whether each of the scales is one number. Kernels want both of a kind.
bool has_whole_scales(const ScaledProduct& product) {
  return is_whole_scale(product.a_scale.sizes()) && is_whole_scale(product.b_scale.sizes());
}

/// Whether the scales are those of blocks, or none at all: a kernel of the device knows, or says what is wrong.
bool has_other_scales(const ScaledProduct& product) {
  const auto a = product.a_scale.sizes(), b = product.b_scale.sizes();
  return !(is_whole_scale(a) || is_row_scale(a, 0, product.a.size(0))) ||
         !(is_whole_scale(b) || is_row_scale(b, 1, product.b.size(1)));
}

/// A plan registers one.
bool has_meta_kernel() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_mm", "");
  return op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
}

/// Returns whose kernel multiplies: on the meta device that of the one that it stands for.
c10::DeviceType kernel_device(const at::Tensor& tensor) {
  return tensor.is_meta() ? device_behind_meta() : tensor.device().type();
}

void check(const ScaledProduct& product) {
  TORCH_CHECK_VALUE(!product.a.is_cpu() || !has_other_scales(product), "_scaled_mm: the scales of matrices ", product.a.sizes(),
                    " and ", product.b.sizes(), " have one element, or the shapes [", product.a.size(0), ", 1] and [1, ",
                    product.b.size(1), "], not ", product.a_scale.sizes(), " and ", product.b_scale.sizes());
  TORCH_CHECK_VALUE(has_whole_scales(product) || !at::isFloat8Type(product.dtype), "_scaled_mm: a result in ", product.dtype,
                    " needs scales of one element");
}

} // namespace

bool is_whole_scale(at::IntArrayRef scale) { return c10::multiply_integers(scale) == 1; }

bool is_row_scale(at::IntArrayRef scale, size_t dim, int64_t rows) {
  return scale.size() == 2 && scale[dim] == rows && scale[1 - dim] == 1;
}

at::Tensor aligned_scaled_mm(ScaledProduct product) {
  const auto k = missing(product.a.size(1)), n = missing(product.b.size(1));
  product.a = padded(product.a.contiguous(), 0, k);
  product.b = padded(product.b.t().contiguous(), n, k).t();
  if (n > 0 && product.bias.defined()) product.bias = at::constant_pad_nd(product.bias, {0, n});
  if (n > 0 && product.b_scale.numel() > 1) product.b_scale = at::constant_pad_nd(product.b_scale, {0, n}, 1);
  product.a_scale = product.a_scale.contiguous();
  product.b_scale = product.b_scale.contiguous();
  const auto result = run_kernel(product);
  return n > 0 ? result.narrow(1, 0, result.size(1) - n).contiguous() : result;
}

at::Tensor scaled_mm(const ScaledProduct& product) {
  check(product);
  if (product.a.is_meta() && !has_meta_kernel())
    return at::empty({product.a.size(0), product.b.size(1)}, product.a.options().dtype(product.dtype));
  if (has_other_scales(product)) return run_kernel(product);
  const bool scales_rows = !has_whole_scales(product);
  const auto device = kernel_device(product.a);
  const bool knows_rows = device == c10::kCUDA && product.dtype == at::kBFloat16;
  if (scales_rows && !knows_rows) return scale_afterwards(product);
  if (product.a.numel() == 0 || product.b.numel() == 0) {
    auto result = at::zeros({product.a.size(0), product.b.size(1)}, product.a.options().dtype(at::kFloat));
    if (product.bias.defined()) result.add_(product.bias);
    return result.to(product.dtype);
  }
  if (device == c10::kCPU) return run_kernel(product);
  if (!scales_rows) return aligned_scaled_mm(product);
  auto with_rows = product;
  with_rows.a_scale = product.a_scale.expand({product.a.size(0), 1});
  with_rows.b_scale = product.b_scale.expand({1, product.b.size(1)});
  return aligned_scaled_mm(with_rows);
}

namespace rules {

namespace {

enum Input : uint8_t { kA, kB, kAScale, kBScale, kBias, kResultScale };

/// A scale of rows lies as the rows do.
TensorDims scale_dims(const std::vector<int64_t>& sizes, size_t dim, int64_t rows, int factor) {
  auto dims = whole_dims(sizes);
  if (rows != 1 && is_row_scale(sizes, dim, rows)) dims.factors[dim] = factor;
  return dims;
}

/// A sum of products is one where it is not rounded to fp8.
bool is_linear(const OpCall& call) {
  const auto dtype = call.integer("out_dtype", static_cast<int64_t>(call.tensors[kA].dtype));
  return !at::isFloat8Type(static_cast<at::ScalarType>(dtype));
}

bool has_known_scales(const OpCall& call) {
  const auto &a = call.tensors[kAScale].sizes, &b = call.tensors[kBScale].sizes;
  return (is_whole_scale(a) || is_row_scale(a, 0, call.tensors[kA].sizes[0])) &&
         (is_whole_scale(b) || is_row_scale(b, 1, call.tensors[kB].sizes[1]));
}

Factorization scaled_mm_factors(const OpCall& call) {
  const auto &a = call.tensors[kA].sizes, &b = call.tensors[kB].sizes;
  TORCH_CHECK(a.size() == 2 && b.size() == 2 && a[1] == b[0], call.name, ": the shapes ", c10::IntArrayRef(a), " and ",
              c10::IntArrayRef(b), " are not those of matrices [m, k] and [k, n]");
  if (!has_known_scales(call)) return whole_factors(call); // blocks
  Factorization factors;
  const auto m = factors.add_factor(a[0]), k = factors.add_factor(a[1]), n = factors.add_factor(b[1]);
  factors.inputs = {{{m, k}, a},
                    {{k, n}, b},
                    scale_dims(call.tensors[kAScale].sizes, 0, a[0], m),
                    scale_dims(call.tensors[kBScale].sizes, 1, b[1], n)};
  const auto& bias = call.tensors[kBias];
  factors.inputs.push_back(bias.defined ? TensorDims{{n}, bias.sizes} : TensorDims{});
  factors.inputs.push_back(whole_dims(call.tensors[kResultScale].sizes));
  TORCH_CHECK(!bias.defined || bias.sizes == std::vector{b[1]}, call.name, ": the bias has the shape ",
              c10::IntArrayRef(bias.sizes), ", not [", b[1], "]");
  factors.outputs.push_back({{m, n}, {a[0], b[1]}});
  if (!is_linear(call)) return factors;
  factors.factors[k].reduction = Partial{};
  if (bias.defined) factors.additive = IndexSet{kBias};
  factors.partial.push_back(flow(factors.additive.with(kA), kLinearOps));
  factors.partial.push_back(flow(factors.additive.with(kB), kLinearOps));
  return factors;
}

void scaled_mm_local(const LocalCall& call) {
  const auto tensor = [&](size_t i) { return call.arg(i).isTensor() ? call.arg(i).toTensor() : at::Tensor(); };
  const auto *dtype = call.find("out_dtype"), *fast = call.find("use_fast_accum");
  call.finish_out(scaled_mm({.a = tensor(kA),
                             .b = tensor(kB),
                             .a_scale = tensor(kAScale),
                             .b_scale = tensor(kBScale),
                             .bias = tensor(kBias),
                             .result_scale = tensor(kResultScale),
                             .dtype = dtype->isNone() ? tensor(kA).scalar_type() : dtype->toScalarType(),
                             .fast_accumulation = fast->toBool()}));
}

} // namespace

void register_scaled_mm(Registry& registry) {
  registry.add("_scaled_mm", OnLocals(scaled_mm_factors).run(scaled_mm_local, KernelKind::kAnyOffsets));
}

} // namespace rules

} // namespace tessera::internal
