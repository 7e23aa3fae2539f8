#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <tessera/fsdp/reduction_extension.h>
#include <tessera/mixed_precision/block_codec.h>

namespace tessera {

/// Gathers parameters in fewer bits (ZeRO++: qwZ). What a rank sends of its shard is coded in blocks; every rank, also the one
/// that sent it, computes with what the codes say, so that all have the same weights. The shards, the optimizer's state and
/// checkpoints stay as they are. In both layouts, in every strategy that gathers; not the gathers of a backward among the ranks
/// of a `reshard_after_forward`, which send what a forward computed with.
struct QuantizedGather {
  BlockCodec codec = {.wire = Wire::kInt8, .block = 256};
  /// Parameters with fewer elements are sent as they are, and so are those of one dim, such as biases and the weights of norms.
  int64_t smallest = 2048;
  /// Chooses the parameters in place of `smallest`. The name is relative to the module given to `fully_shard`. The same on every
  /// rank.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> takes = nullptr;
};

/// How `quantized_reduction` reduces gradients.
struct QuantizedReduction {
  BlockCodec codec = {.wire = Wire::kInt8, .block = 256}; ///< of all reductions
  /// In place of `codec`, of the reductions inside an inner group of a mesh of two dims: these ranks often share a host, and send
  /// more for less.
  std::optional<BlockCodec> inner = {};
  /// Gradients of parameters with fewer elements, or of one dim, are sent as they are.
  int64_t smallest = 2048;
  /// Each rank keeps what the codes of a step lack, and adds it to what it sends in the next one (error feedback). It takes 4
  /// bytes for each element that is reduced: an unsharded parameter's.
  bool error_feedback = false;
};

/// Reduces gradients in fewer bits (ZeRO++: qgZ; torchft: fp8): a rank codes its gradients in blocks and sends each other rank's
/// part to it; that one adds them up in fp32, or fp64, and divides. For an all-reduce it codes the result again, which all
/// gather. The result is the plain one, apart from the rounding of the codes: `BlockCodec::largest_error` of a block's largest
/// number, in the mean over the ranks, for each coding.
std::shared_ptr<const ReductionPolicy> quantized_reduction(const QuantizedReduction& settings = {});

/// How `power_sgd` reduces gradients.
struct PowerSGD {
  int64_t rank = 2;        ///< of the matrices that are sent
  int64_t start_after = 2; ///< steps that are reduced plainly
  uint64_t seed = 0;       ///< of the first matrices, the same on all ranks
};

/// All-reduces gradients as matrices of low rank (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727): of no-shard, and along the
/// replicate dim of a hybrid strategy. With error feedback. A gradient of rows and columns is sent as P [rows, rank] and
/// Q [columns, rank] where these have less than half of its elements, and as it is elsewhere. Reduce-scatters stay plain.
std::shared_ptr<const ReductionPolicy> power_sgd(const PowerSGD& settings = {});

/// How a group's parameters are gathered and its gradients reduced.
struct Communication {
  std::optional<QuantizedGather> gather = {};                 ///< none: as they are
  std::shared_ptr<const ReductionPolicy> reduction = nullptr; ///< null: as they are
};

/// What a text asks for, for flags and config files: settings with commas or spaces between them, such as
/// "gather=int8, reduction=int4, inner=int8, error_feedback, block=256, smallest=2048" or "reduction=power-sgd, rank=2". "" is
/// nothing in fewer bits. An error names what is unknown, twice there, or without a meaning.
Communication communication_of(const std::string& text);

} // namespace tessera
