#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <torch/nn/modules/linear.h>

#include <absl/strings/match.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <tessera/base/dispatch_keys.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/reads/read_call.h>

namespace tessera {

namespace internal {

namespace {

/// The stand-ins of weights. A call of one begins anew with the parameter in its place.
class Float8Kind final : public ReadKind {
 public:
  constexpr Float8Kind() : ReadKind(Turn::kRefuses) {}
  MetSet meets(const at::Tensor& /*tensor*/, size_t /*argument*/, const OperatorTraits& /*traits*/) const override { return {}; }
  void on_read(ReadCall& call) const override;
};
constexpr Float8Kind kFloat8Kind;

/// Knows the parameter that its tensor stands for, or whose transpose.
struct Float8Storage final : ReadStorage {
  Float8Storage(at::Tensor of, Float8Scaling own_scaling, bool transposed)
      : ReadStorage(of.device(), kFloat8Kind), parameter(std::move(of)), scaling(own_scaling), is_transposed(transposed) {}
  const at::Tensor parameter;
  const Float8Scaling scaling;
  const bool is_transposed;
};

/// Null for any other tensor.
const Float8Storage* float8_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kTouchKey) || tensor.key_set().has(kDTensorKey)) return nullptr;
  return dynamic_cast<const Float8Storage*>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

at::Tensor make_stand_in(const at::Tensor& parameter, Float8Scaling scaling, bool is_transposed = false) {
  const auto type = parameter.options();
  const auto keys = c10::DispatchKeySet(type.computeDispatchKey()).add(kTouchKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<Float8Storage>(parameter, scaling, is_transposed)), keys, type.dtype());
  auto sizes = parameter.sizes().vec(), strides = parameter.strides().vec();
  if (is_transposed) std::swap(sizes[0], sizes[1]), std::swap(strides[0], strides[1]);
  impl->set_sizes_and_strides(sizes, strides);
  auto stand_in = at::Tensor(std::move(impl));
  return stand_in.set_requires_grad(parameter.requires_grad());
}

/// How an operator multiplies by a weight, and where its arguments are.
struct Product {
  enum Kind : uint8_t { kNone, kByWeight, kByTranspose } kind = kNone;
  size_t input = 0, weight = 1;
  std::optional<size_t> bias = {};
};

Product product_of(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  if (op.schema().is_mutable()) return {};
  if (name == "aten::linear") return {Product::kByWeight, 0, 1, 2};
  if (name == "aten::matmul" || name == "aten::mm") return {Product::kByTranspose, 0, 1};
  if (name == "aten::addmm") return {Product::kByTranspose, 1, 2, 0};
  return {};
}

/// Whether a sum beside a product is a bias of it: `addmm` has two factors, and adds matrices too.
bool adds_bias(const ReadCall& call, const Product& product) {
  if (call.op.schema().name() != "aten::addmm") return true;
  return call.arguments[*product.bias].toTensor().dim() == 1 && call.arguments[3].toScalar().equal(1) &&
         call.arguments[4].toScalar().equal(1);
}

/// The product in fp8, where the call is one.
std::optional<at::Tensor> multiply(const ReadCall& call) {
  const auto& product = dispatch::read_once<&product_of>(call.op);
  if (product.kind == Product::kNone) return std::nullopt;
  const auto* weight = float8_storage(call.arguments[product.weight].toTensor());
  const at::Tensor input = call.arguments[product.input].toTensor();
  if (!weight || weight->is_transposed != (product.kind == Product::kByTranspose) || float8_storage(input)) return std::nullopt;
  if (!adds_bias(call, product)) return std::nullopt;
  const bool has_bias = product.bias && call.arguments[*product.bias].isTensor();
  return float8_linear(input, weight->parameter, has_bias ? call.arguments[*product.bias].toTensor() : at::Tensor(),
                       weight->scaling);
}

void Float8Kind::on_read(ReadCall& call) const {
  auto result = multiply(call);
  if (!result && call.op.schema().name() == "aten::t") {
    const auto& given = *float8_storage(call.arguments[0].toTensor());
    result = make_stand_in(given.parameter, given.scaling, !given.is_transposed);
  }
  if (result) {
    call.return_arguments(0);
    call.stack->emplace_back(std::move(*result));
    return;
  }
  dispatch::replace_tensors(call.traits, call.arguments, [](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    const auto* storage = float8_storage(tensor);
    if (!storage) return std::nullopt;
    return storage->is_transposed ? storage->parameter.t() : storage->parameter;
  });
  call.op.callBoxed(call.stack);
}

/// Whether `entry` is the last parts of `path`, or of the path of a module above it.
bool names_module(const std::string& entry, const std::string& path) {
  for (auto end = path.size(); end != std::string::npos && end > 0; end = path.rfind('.', end - 1)) {
    const auto above = path.substr(0, end);
    if (above == entry || absl::EndsWith(above, "." + entry)) return true;
  }
  return false;
}

void convert(torch::nn::LinearImpl& linear, const std::string& path, Float8Scaling scaling) {
  const auto parameters = linear.named_parameters(/*recurse=*/false);
  const auto* const parameter = parameters.find("weight");
  const auto* const before = float8_storage(linear.weight);
  TORCH_CHECK_VALUE(parameter && (parameter->is_same(linear.weight) || (before && before->parameter.is_same(*parameter))),
                    "convert_to_float8: the member weight of ", path.empty() ? linear.name() : path,
                    " is not the parameter of that name: assign it, or convert the module before it is changed");
  linear.weight = make_stand_in(*parameter, scaling);
}

/// An error for an entry of `except` that names none of `paths`.
void check_named(const std::vector<std::string>& except, const std::vector<std::string>& paths) {
  for (const auto& entry : except) {
    const bool is_known = std::any_of(paths.begin(), paths.end(), [&](const auto& path) { return names_module(entry, path); });
    TORCH_CHECK_VALUE(is_known, "convert_to_float8: except names \"", entry, "\", which is none of the Linears ",
                      fmt::to_string(fmt::join(paths, ", ")));
  }
}

} // namespace

std::optional<Float8Weight> float8_weight(const at::Tensor& member) {
  const auto* const storage = float8_storage(member);
  return storage ? std::optional(Float8Weight{storage->parameter, storage->scaling}) : std::nullopt;
}

} // namespace internal

std::vector<std::string> convert_to_float8(torch::nn::Module& module, const Float8Options& options) {
  std::vector<std::string> paths, converted;
  std::vector<torch::nn::LinearImpl*> linears;
  const auto visit = [&](const std::string& path, torch::nn::Module& at) {
    auto* const linear = at.as<torch::nn::LinearImpl>();
    if (!linear) return;
    paths.push_back(path);
    linears.push_back(linear);
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) visit(item.key(), *item.value());
  internal::check_named(options.except, paths);
  for (size_t i = 0; i < linears.size(); ++i) {
    const bool stays = std::any_of(options.except.begin(), options.except.end(),
                                   [&](const auto& entry) { return internal::names_module(entry, paths[i]); });
    if (stays) continue;
    internal::convert(*linears[i], paths[i], options.scaling);
    converted.push_back(paths[i]);
  }
  return converted;
}

} // namespace tessera
