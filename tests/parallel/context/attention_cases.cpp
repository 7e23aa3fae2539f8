#include <tessera/tests/parallel/context/attention_cases.h>

#include <gtest/gtest.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::testing {

namespace {

const char* const kMaskNames[] = {"no mask",  "mask of rows",      "mask of keys",         "split mask of keys",
                                  "additive", "mask of each head", "rows that see no key", "a sequence of padding only"};

torch::Tensor draw_mask(const AttentionCase& drawn) {
  const auto rows = drawn.length, keys = drawn.key_length;
  const auto often = [](const std::vector<int64_t>& sizes) { return torch::rand(sizes).gt(0.3); };
  switch (drawn.mask) {
    case MaskKind::kNone: return {};
    case MaskKind::kRows: return often({rows, keys});
    case MaskKind::kKeys:
    case MaskKind::kSplitKeys: return often({drawn.batch, 1, 1, keys});
    case MaskKind::kAdditive: return torch::randn({1, 1, rows, keys});
    case MaskKind::kEachHead: return often({drawn.batch, drawn.heads, rows, keys});
    case MaskKind::kEmptyRows: return often({rows, keys}).logical_and(torch::rand({rows, 1}).gt(0.4));
    case MaskKind::kPaddingOnly: {
      auto mask = often({drawn.batch, 1, 1, keys});
      if (drawn.batch > 0) mask[0].fill_(false);
      return mask;
    }
  }
  return {};
}

/// Which queries see which keys, beside the mask: [length, key length].
torch::Tensor visible(const AttentionCase& drawn) {
  auto sees = torch::ones({drawn.length, drawn.key_length}, torch::kBool);
  if (drawn.is_causal) sees = sees.tril();
  if (drawn.cu_seqlens.empty()) return sees;
  auto documents = torch::zeros({drawn.length}, torch::kLong);
  for (size_t i = 1; i + 1 < drawn.cu_seqlens.size(); ++i) documents.slice(0, drawn.cu_seqlens[i]).add_(1);
  return sees.logical_and(documents.unsqueeze(1).eq(documents.unsqueeze(0)));
}

struct Leaves {
  Leaves(const AttentionTensors& tensors, at::ScalarType dtype, at::ScalarType rounded)
      : query(tensors.query.to(rounded).to(dtype).detach().requires_grad_()),
        key(tensors.key.to(rounded).to(dtype).detach().requires_grad_()),
        value(tensors.value.to(rounded).to(dtype).detach().requires_grad_()),
        upstream(tensors.upstream.to(rounded).to(dtype)) {}
  AttentionNumbers backward(const torch::Tensor& out) const {
    (out * upstream).sum().backward();
    return {out.detach(), query.grad(), key.grad(), value.grad()};
  }
  torch::Tensor query, key, value, upstream;
};

} // namespace

std::string AttentionCase::to_string() const {
  return c10::str("case ", number, ": batch ", batch, ", ", length, " queries, ", key_length, " keys, ", heads, " heads, ",
                  key_heads, " key heads, ", features, " features, ", kMaskNames[static_cast<size_t>(mask)],
                  is_causal ? ", causal" : "", order == PartOrder::kHeadTail ? ", head-tail" : ", contiguous", ", cu_seqlens ",
                  c10::IntArrayRef(cu_seqlens));
}

AttentionCase draw_case(uint64_t number, std::optional<int64_t> ranks) {
  Draw draw(number * 977 + 5);
  AttentionCase drawn;
  drawn.number = number;
  drawn.batch = 1 + draw.below(2);
  drawn.length = drawn.key_length = draw.chance(15) ? 1 + draw.below(3) : 1 + draw.below(40);
  drawn.key_heads = (1 + draw.below(2)) * ranks.value_or(1);
  drawn.heads = drawn.key_heads * (1 + draw.below(3));
  drawn.features = draw.of<int64_t>({4, 8, 5, 16});
  drawn.order = draw.chance(60) ? PartOrder::kHeadTail : PartOrder::kContiguous;
  const auto kind = draw.below(10);
  if (kind < 4) {
    drawn.is_causal = true;
  } else if (kind < 8) {
    drawn.mask = static_cast<MaskKind>(1 + draw.below(7));
  }
  if (drawn.mask == MaskKind::kNone && draw.chance(30)) {
    drawn.cu_seqlens = {0, draw.below(drawn.length + 1), draw.below(drawn.length + 1), drawn.length};
    std::sort(drawn.cu_seqlens.begin(), drawn.cu_seqlens.end());
  } else if (!drawn.is_causal && draw.chance(30)) {
    drawn.key_length = 1 + draw.below(20);
  }
  return drawn;
}

AttentionTensors draw_tensors(const AttentionCase& drawn) {
  torch::manual_seed(drawn.number);
  AttentionTensors tensors;
  tensors.query = torch::randn({drawn.batch, drawn.heads, drawn.length, drawn.features});
  tensors.key = torch::randn({drawn.batch, drawn.key_heads, drawn.key_length, drawn.features});
  tensors.value = torch::randn({drawn.batch, drawn.key_heads, drawn.key_length, drawn.features});
  tensors.upstream = torch::randn({drawn.batch, drawn.heads, drawn.length, drawn.features});
  tensors.mask = draw_mask(drawn);
  return tensors;
}

AttentionNumbers by_one_kernel(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType dtype) {
  const Leaves leaves(tensors, dtype, dtype);
  std::optional<torch::Tensor> mask;
  if (tensors.mask.defined()) mask = tensors.mask.is_floating_point() ? tensors.mask.to(dtype) : tensors.mask;
  if (!drawn.cu_seqlens.empty()) mask = visible(drawn);
  const bool is_causal = drawn.is_causal && !mask;
  return leaves.backward(
      at::scaled_dot_product_attention(leaves.query, leaves.key, leaves.value, mask, 0.0, is_causal, std::nullopt, true));
}

AttentionNumbers in_fp64(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType inputs) {
  const Leaves leaves(tensors, torch::kDouble, inputs);
  const auto groups = drawn.heads / drawn.key_heads;
  const auto key = leaves.key.repeat_interleave(groups, 1), value = leaves.value.repeat_interleave(groups, 1);
  auto scores = leaves.query.matmul(key.transpose(-2, -1)) / std::sqrt(static_cast<double>(drawn.features));
  auto sees = visible(drawn);
  if (tensors.mask.defined()) {
    if (tensors.mask.is_floating_point()) {
      scores = scores + tensors.mask.to(inputs).to(torch::kDouble);
    } else {
      sees = sees.logical_and(tensors.mask);
    }
  }
  const auto weights = scores.masked_fill(sees.logical_not(), -std::numeric_limits<double>::infinity());
  const auto rows = sees.any(-1, /*keepdim=*/true);
  const auto safe = torch::where(rows, weights, torch::zeros_like(weights)).softmax(-1);
  return leaves.backward(torch::where(rows, safe, torch::zeros_like(safe)).matmul(value));
}

AttentionNumbers over_ranks(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType dtype,
                            ContextParallel scheme) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"cp"});
  SequenceSplitOptions split;
  split.order = drawn.order;
  const auto queries = split_sequence({tensors.query.to(dtype), tensors.upstream.to(dtype)}, {2, -2}, mesh, split);
  const auto keys = split_sequence({tensors.key.to(dtype), tensors.value.to(dtype)}, {2, 2}, mesh, split);
  const auto query = queries.tensors[0].detach().requires_grad_(), key = keys.tensors[0].detach().requires_grad_(),
             value = keys.tensors[1].detach().requires_grad_();
  ContextAttentionOptions options;
  options.scheme = scheme;
  options.is_causal = drawn.is_causal;
  options.cu_seqlens = drawn.cu_seqlens;
  if (tensors.mask.defined()) options.mask = tensors.mask.to(mesh.device());
  if (drawn.mask == MaskKind::kSplitKeys) options.mask = split_sequence({tensors.mask}, {3}, mesh, split).tensors[0];
  const auto out = context_parallel_attention(query, key, value, options);
  (out * queries.tensors[1]).sum().backward();
  const auto whole = [](const torch::Tensor& tensor) { return merge_sequence(tensor, 2).cpu(); };
  const torch::NoGradGuard no_grad;
  return {whole(out), whole(query.grad()), whole(key.grad()), whole(value.grad())};
}

AttentionErrors relative_errors(const AttentionNumbers& got, const AttentionNumbers& expected) {
  const auto norm = [](const torch::Tensor& tensor) {
    return tensor.numel() == 0 ? 0 : tensor.to(torch::kDouble).norm().item<double>();
  };
  const auto all = std::hypot(norm(expected.query), norm(expected.key), norm(expected.value));
  const auto error = [&](const torch::Tensor& tensor, const torch::Tensor& like, double least) {
    EXPECT_EQ(tensor.sizes(), like.sizes());
    const auto difference = norm(tensor.to(torch::kDouble) - like.to(torch::kDouble)), scale = norm(like);
    constexpr double kNothing = 1e-3;
    if (difference == 0) return 0.0;
    return std::isfinite(difference) ? difference / (scale < kNothing * least ? least : scale)
                                     : std::numeric_limits<double>::infinity();
  };
  return {error(got.out, expected.out, 0), error(got.query, expected.query, all), error(got.key, expected.key, all),
          error(got.value, expected.value, all)};
}

} // namespace tessera::testing
