#pragma once

// Internal: what the ranks send of a group's shards where its gathers are quantized.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <utility>
#include <vector>

#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/mixed_precision/block_codec.h>

namespace tessera::internal {

/// A parameter as the messages see it.
struct GatheredParameter {
  c10::ScalarType dtype = at::kFloat; ///< in which forward reads it
  bool is_quantized = false;
  bool is_sent = true; ///< by itself, and not by a gather extension
};

/// What a gather makes whole: of the ranks of the shard axis from `first` on, `each` of each of `peers`.
struct MessageRanks {
  int64_t first = 0, each = 1, peers = 1;
  int64_t own = 0; ///< which of the peers this rank is
};

/// The message of a rank of the shard axis has what the group gathers of its shard, byte by byte, but the codes of parameters
/// that are quantized. What several neighbouring ranks of the axis own is their messages, one after another. Every rank knows all
/// messages' sizes from the layout.
class GatherMessages {
 public:
  GatherMessages() = default;
  GatherMessages(const BlockCodec& codec, std::vector<GatheredParameter> parameters)
      : codec_(codec), parameters_(std::move(parameters)) {}

  bool is_empty() const { return parameters_.empty(); }
  bool contains(size_t index) const { return index < parameters_.size() && parameters_[index].is_quantized; }
  const BlockCodec& codec() const { return codec_; }

  /// Bytes of the largest of what the peers send. Each of the shard axis' ranks gathers `sent_bytes`.
  int64_t largest(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks) const;
  /// Writes what this rank sends of `parts` ([each × sent_bytes] bytes).
  void encode(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks, const at::Tensor& parts,
              const at::Tensor& message) const;
  /// Does the reverse, for what all peers have sent, each in an equal part of `messages`.
  void decode(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks, const at::Tensor& messages,
              const at::Tensor& parts) const;

 private:
  struct Places;
  int64_t add_places(const GroupLayout& layout, int64_t sent_bytes, int64_t rank, int64_t part, int64_t message,
                     Places& places) const;

  BlockCodec codec_;
  std::vector<GatheredParameter> parameters_;
};

} // namespace tessera::internal
