#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/support/draw.h>

namespace tessera::testing {

enum class MaskKind { kNone, kRows, kKeys, kSplitKeys, kAdditive, kEachHead, kEmptyRows, kPaddingOnly };

/// One call of attention, drawn from its number.
struct AttentionCase {
  uint64_t number = 0;
  int64_t batch = 1, length = 1, key_length = 1, heads = 1, key_heads = 1, features = 8;
  MaskKind mask = MaskKind::kNone;
  bool is_causal = false;
  PartOrder order = PartOrder::kContiguous;
  std::vector<int64_t> cu_seqlens;
  std::string to_string() const;
};

/// Heads are multiples of `ranks`, for Ulysses, where that is set.
AttentionCase draw_case(uint64_t number, std::optional<int64_t> ranks);

struct AttentionTensors {
  torch::Tensor query, key, value, upstream;
  torch::Tensor mask; ///< whole; undefined for none
};
/// In fp32, the same on every rank.
AttentionTensors draw_tensors(const AttentionCase& drawn);

/// What attention gives and its gradients, whole.
struct AttentionNumbers {
  torch::Tensor out, query, key, value;
};

/// In one process: by PyTorch's kernel, or in fp64 by products and exponentials.
AttentionNumbers by_one_kernel(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType dtype);
AttentionNumbers in_fp64(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType inputs);
/// Over all ranks.
AttentionNumbers over_ranks(const AttentionCase& drawn, const AttentionTensors& tensors, at::ScalarType dtype,
                            ContextParallel scheme);

/// The relative error of each tensor: the norm of the difference over that of what is expected. A gradient that
/// cancels to nothing (of a query that sees one key) is only rounding, and is compared with all gradients. Infinite where a
/// number is not finite.
struct AttentionErrors {
  double out, query, key, value;
};
AttentionErrors relative_errors(const AttentionNumbers& got, const AttentionNumbers& expected);

} // namespace tessera::testing
