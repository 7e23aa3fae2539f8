#pragma once

// Internal: where the parameters of one group lie in its buffers.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/options.h>

namespace tessera::internal {

/// The largest of the parts that other dims of the mesh have made of a tensor.
struct LargestPart {
  std::vector<int64_t> sizes;
  size_t last_uneven = 0; ///< a dim: the parts have the same sizes in those after it
};

/// What a layout needs to know of a parameter. The unsharded dtype is the one in which forward reads it.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> sizes;
  c10::ScalarType unsharded_dtype = c10::kFloat;
  std::optional<Placement> placement = {}; ///< along the shard dim, where the program chose it
  /// Where it is a part of a tensor, other ranks may have larger ones. A ragged layout has the largest one's room and extents.
  std::optional<LargestPart> largest = {};

  int64_t numel() const;
};

/// What one rank owns of a parameter: the elements [begin, begin + numel) of it, flattened; or, of a parameter that is split
/// along another dim than the first, `numel` elements from `begin` along that.
struct OwnedRange {
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t shard_offset = 0; ///< bytes, inside that rank's shard
};

/// What each rank owns of a parameter. Neighbours that own as much, each after the one before, are kept once.
class Pieces {
 public:
  /// The ranks from `first` to `first` + `ranks`. Each range begins `step` after the one of the rank before.
  struct Run {
    int64_t first = 0, ranks = 0;
    OwnedRange range; ///< of the first rank
    int64_t step = 0;
  };

  Pieces() = default;
  explicit Pieces(const std::vector<OwnedRange>& pieces);
  /// Adds the pieces of the next `ranks` ranks: `range`, and each further one `step` after the one before.
  void append(int64_t ranks, const OwnedRange& range, int64_t step);

  size_t size() const { return static_cast<size_t>(runs_.empty() ? 0 : runs_.back().first + runs_.back().ranks); }
  OwnedRange operator[](size_t rank) const;
  const std::vector<Run>& runs() const { return runs_; }
  std::vector<OwnedRange> expanded() const;

 private:
  std::vector<Run> runs_;
};

struct ParameterLayout {
  Placement placement;          ///< along the shard dim of the mesh
  Pieces pieces;                ///< one a rank
  int64_t unsharded_offset = 0; ///< bytes, inside the unsharded storage
  int64_t split_dim = 0;        ///< 0: the pieces are ranges of the flattened parameter

  bool is_replicated() const { return std::holds_alternative<Replicate>(placement); }
};

/// The part of a parameter, or of what has its shape, that a rank owns: a view of a contiguous `whole`, flat or a range of a dim.
at::Tensor owned_part(const at::Tensor& whole, const ParameterLayout& layout, size_t rank);

/// The parts of a run of flat pieces, one a row.
at::Tensor rows_of(const at::Tensor& whole, const Pieces::Run& run);

/// Up to so many ranks a copy for each costs no more than one of all their rows.
inline constexpr int64_t kFewRanks = 64;

/// The layout of a group. A rank's shard is `shard_bytes` that it contributes to the all-gather, then `replicated_bytes` for
/// 0-dim parameters, which every rank holds whole. The unsharded storage ends with the 0-dim parameters too.
struct GroupLayout {
  std::vector<ParameterLayout> parameters;
  int64_t shard_bytes = 0;
  int64_t replicated_bytes = 0;
  int64_t unsharded_bytes = 0;
  /// The all-gather's output is the head of the unsharded storage itself; otherwise a copy follows.
  bool gathers_in_place = true;
  /// A parameter's pieces lie at one offset inside all shards.
  bool is_uniform = false;
};

/// Of all parameters that are split and have elements.
struct PieceCount {
  int64_t count = 0;     ///< of pieces that are not empty
  bool are_equal = true; ///< all ranks own as much of each parameter
};
PieceCount count_pieces(const GroupLayout& layout);

/// Alignment in bytes of a parameter inside a buffer.
inline constexpr int64_t kParameterAlignment = 16;

/// Parameters whole, one after another (veScale's RaggedShard): rank r owns the r-th `shard_bytes` of the unsharded storage. The
/// cuts fall between rows of dim 0 where less than about 1 % of padding allows it, and otherwise inside a row.
GroupLayout plan_ragged(const std::vector<ParameterShape>& own, int ranks);

/// Every parameter is split along dim 0 as torch.chunk splits it, rank parts padded to the first one's size (FSDP2).
GroupLayout plan_per_parameter(const std::vector<ParameterShape>& parameters, int ranks);

/// Every parameter has the placement that was chosen for it, or Shard(0). Each rank's pieces lie one after another.
GroupLayout plan_placed(const std::vector<ParameterShape>& parameters, int ranks);

/// Takes parameters out of what is sent, whose gather is extended, and closes the gaps. For what `plan_placed` made.
void leave_out(const std::vector<bool>& extended, const std::vector<ParameterShape>& parameters, GroupLayout& layout);

/// An error that names the parameter unless its chosen placement splits it over so many ranks.
void check_placement(const ParameterShape& parameter, int ranks);

GroupLayout plan_layout(BufferLayout kind, const std::vector<ParameterShape>& parameters, int ranks);

/// Where the gradients lie in the reduce-scatter's input: rank r's part starts at r × `chunk_numel`, and holds its pieces of the
/// given parameters and one used-flag a parameter. In elements of the reduce dtype.
struct ReduceLayout {
  std::vector<RankValues> offsets; ///< [parameter][rank]; empty for a parameter that takes no part
  int64_t used_offset = 0;
  int64_t chunk_numel = 0;
};

ReduceLayout plan_reduce(const GroupLayout& layout, const std::vector<bool>& takes_part);

/// Neighbouring ranks whose pieces of a parameter lie at the same place of each rank's part; none is empty.
struct Stretch {
  Pieces::Run pieces;
  int64_t offset = 0; ///< elements, inside a rank's part
};
std::vector<Stretch> stretches_of(const Pieces& pieces, const RankValues& offsets);

} // namespace tessera::internal
