#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/collectives/work.h>

namespace tessera {

/// The gradient of a parameter, or the part of it that one rank of the shard axis gets.
struct GradientPiece {
  size_t parameter;           ///< its number in `GradientLayout::names`
  int64_t offset;             ///< in elements, inside a chunk
  std::vector<int64_t> sizes; ///< whole rows of the parameter where they are that, else {elements}

  int64_t numel() const;
};

/// How a group's gradients lie in its reductions: a chunk for each rank of the shard axis (one where nothing is sharded), all of
/// one size. A chunk begins with pieces, with gaps between them that nothing has written. It ends with a number for each
/// parameter, which is not 0 where this rank used it: the same in all chunks.
struct GradientLayout {
  std::vector<std::string> names;
  std::vector<std::vector<int64_t>> sizes;        ///< of the whole parameters
  std::vector<std::vector<GradientPiece>> chunks; ///< the pieces of each, by their offsets
  int64_t flags = 0;                              ///< where the numbers begin, inside a chunk; as many as `names`
  int64_t chunk_numel = 0;
  at::ScalarType dtype = at::kFloat; ///< of the reduction
};

/// One collective of a reduction.
struct ReductionStage {
  enum class Kind { kReduceScatter, kAllReduce };

  Kind kind = Kind::kReduceScatter;
  size_t number = 0;       ///< of the group's reductions, from the innermost ranks to the outermost
  int64_t first_chunk = 0; ///< of the input, in the layout
  int64_t chunks = 1;      ///< of the input
  Communicator* communicator = nullptr;
};

/// What a `ReductionExtension` is to do.
struct Reduction {
  ReductionStage stage;
  ReduceOp op;       ///< kSum or kAvg
  at::Tensor input;  ///< flat, on the group's device: chunks. It may be overwritten
  at::Tensor output; ///< of a reduce-scatter: this rank's part of the chunks. Of an all-reduce: the input
  std::string label; ///< for the collectives
};

/// How the gradients of one group are reduced, in place of the communicators' reduce-scatters and all-reduces. A program may
/// write its own. (DDP: communication hooks.)
///
/// Every rank of a stage calls `reduce` at the same place in its order of collectives. What it gives must be the same on all
/// ranks that get the same chunk, bit for bit: they are replicas. A number that is not finite must arrive as one. The flags at
/// the end of a chunk must arrive as not 0 where any rank's is not 0, and as 0 elsewhere.
class ReductionExtension {
 public:
  virtual ~ReductionExtension() = default;

  /// Starts a stage, over `stage.communicator` alone. The output is there when the `Work` has been waited for (`tessera::then`
  /// makes one with steps after a collective); before that nothing reads the input. Called in backward, without grad mode.
  virtual Work reduce(const Reduction& reduction) = 0;
  /// The bytes of one `reduce` in the measure of `CollectiveCounters`, for reports and predictions.
  virtual int64_t payload(const ReductionStage& stage) const = 0;
  /// Bytes that it keeps from one step to the next, whether or not they exist yet.
  virtual int64_t state_bytes() const { return 0; }
  /// What it keeps from one step to the next, by names: tensors of which each has the same shape on all ranks. A load writes into
  /// them.
  virtual std::vector<std::pair<std::string, at::Tensor>> state() { return {}; }
};

/// Makes the extension of each group.
class ReductionPolicy {
 public:
  virtual ~ReductionPolicy() = default;

  /// Kind and settings. `fully_shard` compares it between the ranks, and a checkpoint keeps it.
  virtual std::string description() const = 0;
  /// An error of `fully_shard` for reductions that it cannot be used with.
  virtual void check(const std::vector<ReductionStage>& /*stages*/) const {}
  /// The extension of a group; null where the group is reduced plainly. It is made when the group is first reduced, and anew,
  /// without its state, where other parameters require gradients than before. Every rank makes the same. `stages` are all that
  /// the group has. Their communicators may be others later, of the same ranks.
  virtual std::shared_ptr<ReductionExtension> make(const std::shared_ptr<const GradientLayout>& layout,
                                                   const std::vector<ReductionStage>& stages) const = 0;
};

} // namespace tessera
