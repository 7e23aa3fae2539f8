#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <absl/strings/str_replace.h>

#include <algorithm>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::rules {

namespace {

void replace(Factorization& factors, int from, int to) {
  for (auto& input : factors.inputs) std::replace(input.factors.begin(), input.factors.end(), from, to);
  for (auto& output : factors.outputs) std::replace(output.factors.begin(), output.factors.end(), from, to);
}

/// `pattern` names the query's heads h and the key's g. Where the query has several heads for each of the key's (grouped-query
/// attention) a rank takes whole groups; where the key has one head for all, each rank takes that, and its gradient is a sum.
Factorization split_heads(const OpCall& call, std::string_view pattern, size_t query) {
  auto factors = pattern_factors(call, pattern);
  if (factors.inputs[query].factors.size() != 4 || factors.inputs[query + 1].factors.size() != 4) return whole_factors(call);
  const int heads = factors.inputs[query].factors[1], key_heads = factors.inputs[query + 1].factors[1];
  if (heads == kNoFactor || key_heads == kNoFactor) return factors;
  const auto count = factors.factors[heads].size, key_count = factors.factors[key_heads].size;
  if (key_count == 1 && count > 1) {
    factors.factors[heads].reduction = Partial{};
    replace(factors, key_heads, kNoFactor);
  } else {
    if (count != key_count) factors.factors[key_heads].limit = SplitLimit::kEven;
    replace(factors, heads, key_heads);
  }
  return factors;
}

/// Where the kernel drops weights at random, each rank runs the whole, and draws what one device would.
bool drops(const OpCall& call) {
  const auto* p = call.find("dropout_p");
  return p && p->isDouble() && p->toDouble() > 0;
}

/// A mask of query [b, h, ...] for each batch and head; others are broadcast over both, or left out.
bool full_mask(const TensorArg& mask) { return mask.sizes.size() == 4; }
bool fits_query(const TensorArg& mask, const TensorArg& query) {
  return !full_mask(mask) ||
         (query.sizes.size() == 4 && std::equal(mask.sizes.begin(), mask.sizes.begin() + 2, query.sizes.begin()));
}

/// query [b, h, l, e], key and value [b, g, s, e]: batch and heads split. `pattern`: of the operator's tensors, `M` for the mask
/// that is its tensor `mask`.
struct Attention {
  std::string_view pattern;
  enum Layout { kLikeQuery, kHeadsInside, kGradients };
  Layout layout = kGradients; ///< of the result's memory; kGradients: of a backward kernel
  std::optional<size_t> mask{};
  bool expanded_mask = true; ///< the kernel takes a mask of the query's batch and heads only

  bool backward() const { return layout == kGradients; }

  Factorization operator()(const OpCall& call) const {
    auto factors = split(call);
    if (backward()) return factors;
    factors.wrapping.plain = IndexSet::from(2); // what follows the result and logsumexp is read by the backward kernel alone
    if (factors.wrapping.shapes == Wrapping::kPlanned) lay_out_result(call, factors);
    return factors;
  }

 private:
  Factorization split(const OpCall& call) const {
    if (drops(call)) return whole_factors(call);
    const size_t query = backward() ? 1 : 0;
    if (!mask) return split_heads(call, pattern, query);
    const auto& given = call.tensors[*mask];
    if (expanded_mask && !fits_query(given, call.tensors[query])) return whole_factors(call);
    const std::string_view dims = full_mask(given) ? "bh**" : "~";
    return split_heads(
        call, absl::StrReplaceAll(absl::string_view(pattern.data(), pattern.size()), {{"M", {dims.data(), dims.size()}}}), query);
  }

  /// [b, h, l, e of the value].
  void lay_out_result(const OpCall& call, Factorization& factors) const {
    auto sizes = call.tensors[0].sizes;
    if (sizes.size() != 4) return;
    sizes[3] = call.tensors[2].sizes.back();
    factors.outputs[0].sizes = sizes;
    if (layout == kHeadsInside) {
      factors.strides = {sizes[1] * sizes[2] * sizes[3], sizes[3], sizes[1] * sizes[3], 1};
    } else {
      factors.strides = at::infer_dense_strides(sizes, call.tensors[0].spec->strides());
    }
  }
};

/// The choice of a kernel depends on the global shapes, so that all ranks choose alike.
void choose_kernel(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  for (auto& value : *stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto tensor = value.toTensor();
    if (const auto* meta = dtensor_meta(tensor)) {
      auto plain = at::empty_strided(meta->spec->sizes(), meta->spec->strides(), meta->local.options());
      value = plain.set_requires_grad(tensor.requires_grad());
    }
  }
  op.callBoxed(*stack);
}

} // namespace

void register_attention(Registry& registry) {
  const auto add = [&registry](std::string_view name, const Attention& attention) {
    const auto traits = attention.backward() ? Traits{Trait::kStaticScalars, Trait::kPlainIsReplicate} : Trait::kStaticScalars;
    registry.add(name, OnLocals(attention).with(traits));
  };
  using Layout = Attention::Layout;
  add("_scaled_dot_product_flash_attention_for_cpu", {"bh**,bg**,bg**,M->bh**,bh*", Layout::kLikeQuery, 3, false});
  add("_scaled_dot_product_flash_attention_for_cpu_backward",
      {"bh**,bh**,bg**,bg**,bh**,bh*,M->bh**,bg**,bg**", Layout::kGradients, 6, false});
  add("_scaled_dot_product_flash_attention.", {"bh**,bg**,bg**->bh**,bh*,~", Layout::kLikeQuery});
  add("_scaled_dot_product_flash_attention_backward", {"bh**,bh**,bg**,bg**,bh**,bh*,~->bh**,bg**,bg**"});
  add("_scaled_dot_product_efficient_attention", {"bh**,bg**,bg**,M->bh**,bh*,~", Layout::kHeadsInside, 3});
  add("_scaled_dot_product_efficient_attention_backward",
      {"bh**,bh**,bg**,bg**,M,bh**,bh*,~->bh**,bg**,bg**,bh**", Layout::kGradients, 4});
  add("_scaled_dot_product_cudnn_attention", {"bh**,bg**,bg**,M->bh**,bh**,~", Layout::kLikeQuery, 3});
  add("_scaled_dot_product_cudnn_attention_backward",
      {"bh**,bh**,bg**,bg**,bh**,bh**,~,~,M,~->bh**,bg**,bg**", Layout::kGradients, 8});
  registry.add("_fused_sdp_choice", Handler(choose_kernel));
}

} // namespace tessera::internal::rules
