// scaled_dot_product_attention on the meta device takes the way that it takes on the CPU: the fused kernel where it can.

#include <tessera/plan/shapes/meta_library.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_fused_sdp_choice_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty_like.h>

#include <span>

#include <tessera/parallel/context/attention_of_parts.h>

namespace tessera::internal::shapes {

namespace {

constexpr auto kComposite = c10::DispatchKey::CompositeImplicitAutograd;
constexpr size_t kArguments = 8; ///< of scaled_dot_product_attention

/// [batch, heads, length, width] that lies in memory as [batch, length, heads, width].
Tensor by_positions(const Tensor& like) {
  return empty_of(like, {like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

Two attention(const Tensor& query, const Tensor& key, const Tensor& value, double, bool, const MaybeTensor&,
              std::optional<double>) {
  TORCH_CHECK_VALUE(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "attention: query, key and value have the shapes ",
                    query.sizes(), ", ", key.sizes(), " and ", value.sizes(), ", but must be [batch, heads, length, width]");
  const auto dtype = at::isReducedFloatingType(query.scalar_type()) ? at::kFloat : query.scalar_type();
  return {at::empty_like(query), empty_of(query, {query.size(0), query.size(2), query.size(1)}, dtype).transpose(1, 2)};
}

Three attention_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&, const Tensor&,
                         double, bool, const MaybeTensor&, std::optional<double>) {
  return {by_positions(query), by_positions(key), by_positions(value)};
}

using FlashResults = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

/// CUDA's, which context parallelism calls for blocks of a sequence.
FlashResults flash(const Tensor& query, const Tensor& key, const Tensor&, double, bool, bool, std::optional<double>) {
  auto statistics = empty_of(query, {query.size(0), query.size(1), query.size(2)}, at::kFloat);
  const auto random = [&](IntArrayRef sizes) { return empty_of(query, sizes, at::kUInt64); };
  return {at::empty_like(query), std::move(statistics), Tensor(), Tensor(), query.size(2), key.size(2), random({2}), random({}),
          empty_of(query, {0})};
}

Three flash_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&, const Tensor&,
                     // NOLINTNEXTLINE(performance-unnecessary-value-param): the signature of the schema
                     const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool, const Tensor&, const Tensor&,
                     std::optional<double>) {
  return {by_positions(query), by_positions(key), by_positions(value)};
}

using EfficientResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

EfficientResults efficient(const Tensor& query, const Tensor&, const Tensor& value, const MaybeTensor&, bool, double, bool,
                           std::optional<double>) {
  constexpr int64_t kAlignment = 32; // of the statistics
  const auto rows = (query.size(2) + kAlignment - 1) / kAlignment * kAlignment;
  const auto out = empty_of(query, {query.size(0), query.size(2), query.size(1), value.size(3)}).transpose(1, 2);
  return {out, empty_of(query, {query.size(0), query.size(1), rows}, at::kFloat), empty_of(query, {}, at::kLong),
          empty_of(query, {}, at::kLong)};
}

EfficientResults efficient_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                                    const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, std::array<bool, 4>, bool,
                                    std::optional<double>) {
  return {by_positions(query), by_positions(key), by_positions(value), Tensor()};
}

/// The arguments of a call, the last ones of the stack.
struct Call {
  explicit Call(torch::jit::Stack& stack) : values(std::span(stack).last(kArguments)) {}
  const Tensor& tensor(size_t i) const { return values[i].toTensor(); }
  MaybeTensor mask() const { return values[3].isNone() ? std::nullopt : MaybeTensor(values[3].toTensor()); }
  /// CUDA's kernels draw dropout anew in backward. The CPU's have none, so that it keeps the weights.
  double dropout() const { return device_behind_meta() == c10::DeviceType::CUDA ? 0 : values[4].toDouble(); }
  bool is_causal() const { return values[5].toBool(); }
  std::optional<double> scale() const { return values[6].toOptional<double>(); }

  bool is_fused() const {
    const auto choice = at::cpu::_fused_sdp_choice(tensor(0), tensor(1), tensor(2), mask(), dropout(), is_causal(), scale(),
                                                   /*enable_gqa=*/values[7].toBool());
    return choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  }
  /// The mask as what is added to the scores.
  MaybeTensor added_mask() const {
    auto given = mask();
    if (given && given->scalar_type() == at::kBool)
      return at::empty_like(*given, given->options().dtype(tensor(0).scalar_type()));
    return given;
  }

  std::span<const c10::IValue> values;
};

void run_on_meta(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const Call call(stack);
  if (!call.is_fused()) return op.callBoxedForDispatchKey(kComposite, stack);
  auto out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
      call.tensor(0), call.tensor(1), call.tensor(2), call.dropout(), call.is_causal(), call.added_mask(), call.scale()));
  torch::jit::drop(stack, kArguments);
  torch::jit::push(stack, std::move(out));
}

void attention_of_models(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  if (!run_attention_of_parts(*stack)) run_on_meta(op, *stack);
}

} // namespace

void add_attention(MetaLibrary& library) {
  library.add("_scaled_dot_product_flash_attention_for_cpu", attention);
  library.add("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
  library.add("_scaled_dot_product_flash_attention", flash);
  library.add("_scaled_dot_product_flash_attention_backward", flash_backward);
  library.add("_scaled_dot_product_efficient_attention", efficient);
  library.add("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}

void add_choice_of_attention(MetaLibrary& autograd) {
  attention_on_meta = run_on_meta; // for DTensors, whose keys are those of the CPU
  autograd.add("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&attention_of_models>());
}

} // namespace tessera::internal::shapes
