// The copies of a gather: from the shard to what is sent, and from what was gathered to the unsharded parameters.

#include <algorithm>

#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/buffers/copy_elements.h>
#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/buffers/row_split.h>
#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

void GroupGather::restride_gathered() {
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& parameter = group_.parameters()[i];
    if (parameter.strides.are_made_by_gathers() && !extended_.contains(i))
      whole_parameter(i).copy_(row_major_parameter(i).clone());
  }
}

void GroupGather::fill_replicated(const at::Tensor& unsharded) {
  CopyList copies;
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& layout = group_.layout().parameters[i];
    if (!layout.is_replicated()) continue;
    copies.copy(flat_view(unsharded, layout.unsharded_offset, 1, group_.parameters()[i].leaf.scalar_type()),
                fetched_local(i).view({-1}));
  }
  copies.run();
}

void GroupGather::cast_into(const at::Tensor& destination) {
  if (group_.shard_.plan().casts_whole) {
    const auto& any = group_.parameters()[0];
    const auto numel = group_.layout().shard_bytes / static_cast<int64_t>(c10::elementSize(any.forward.dtype));
    flat_view(destination, 0, numel, any.forward.dtype).copy_(flat_view(fetched_shard(), 0, numel, any.spec->dtype()));
    return;
  }
  CopyList copies;
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto piece = group_.layout().parameters[i].pieces[rank];
    if (piece.numel == 0 || group_.layout().parameters[i].is_replicated() || extended_.contains(i)) continue;
    copies.copy(flat_view(destination, piece.shard_offset, piece.numel, group_.parameters()[i].leaf.scalar_type()),
                in_memory_order(fetched_local(i)));
  }
  copies.run();
}

void GroupGather::copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies) {
  const auto& layout = group_.layout().parameters[index];
  const auto whole = row_major_parameter(index);
  const auto item = static_cast<int64_t>(whole.element_size());
  for (const auto& run : layout.pieces.runs()) {
    const auto& range = run.range;
    if (range.numel == 0) continue;
    if (layout.split_dim == 0 && run.ranks > kFewRanks) {
      const auto sent = by_rank.narrow(0, run.first, run.ranks).narrow(1, range.shard_offset, range.numel * item);
      copies.copy(rows_of(whole, run), sent.view(whole.scalar_type()));
      continue;
    }
    for (int64_t rank = run.first; rank < run.first + run.ranks; ++rank) {
      const auto offset = by_rank.storage_offset() + rank * by_rank.stride(0) + range.shard_offset;
      const auto sent = tensor_over(by_rank.storage(), offset, {range.numel}, whole.scalar_type());
      if (layout.split_dim == 0) {
        copies.copy(flat_range(whole, layout.pieces[static_cast<size_t>(rank)].begin, range.numel), sent);
      } else {
        const auto part = owned_part(whole, layout, static_cast<size_t>(rank));
        copies.copy(part, sent.view(part.sizes()));
      }
    }
  }
}

namespace {

/// Copies a parameter of `bytes` to `to` (bytes) of `output` from the shards of all ranks, [ranks, bytes], in each of which
/// `part` bytes of it begin at `from`. The last part may be shorter, and parts may be missing.
void copy_parts(const at::Tensor& output, int64_t to, int64_t bytes, const at::Tensor& by_rank, int64_t from, int64_t part) {
  if (is_small_plain_copy(output, by_rank, part)) {
    for (int64_t done = 0; done < bytes; done += part, from += by_rank.size(1))
      copy_elements(output, to + done, by_rank, from, std::min(part, bytes - done));
    return;
  }
  const auto whole = output.narrow(0, to, bytes);
  const int64_t full_ranks = bytes / part; // the ranks before the uneven tail
  whole.narrow(0, 0, full_ranks * part).view({full_ranks, part}).copy_(by_rank.narrow(0, 0, full_ranks).narrow(1, from, part));
  if (const int64_t rest = bytes - full_ranks * part; rest > 0)
    whole.narrow(0, full_ranks * part, rest).copy_(by_rank[full_ranks].narrow(0, from, rest));
}

} // namespace

/// Whether pieces are split by rows: on a device with streams, where they are too many for a `CopyList`. Unequal pieces of many
/// ranks are too many to be listed as well.
bool GroupGather::splits_rows() const {
  if (!group_.layout().is_uniform || !group_.streams().gather.exists() || !extended_.is_empty()) return false;
  const auto pieces = count_pieces(group_.layout());
  return pieces.count > kMostPairs && (pieces.are_equal || group_.roles().shard_ranks() <= kFewRanks);
}

/// All ranks' pieces of a parameter at once, where they are equal; otherwise each by itself.
void GroupGather::split_rows(const at::Tensor& by_rank) {
  const bool is_even = count_pieces(group_.layout()).are_equal;
  const int64_t ranks = by_rank.size(0), width = by_rank.size(1), parts = is_even ? 1 : ranks;
  const auto output = unsharded_bytes();
  RowSplit split(by_rank.view({ranks / parts, parts * width}));
  for (int64_t rank = 0; rank < parts; ++rank) {
    for (size_t i = 0; i < group_.parameters().size(); ++i) {
      const auto& parameter = group_.layout().parameters[i];
      const auto piece = parameter.pieces[static_cast<size_t>(rank)];
      if (piece.numel == 0 || parameter.is_replicated()) continue;
      const auto item = static_cast<int64_t>(group_.parameters()[i].leaf.element_size());
      const int64_t place = parameter.unsharded_offset + piece.begin * item;
      split.copy(rank * width + piece.shard_offset,
                 tensor_over(output.storage(), place, {ranks / parts, piece.numel * item}, at::kByte));
    }
  }
  split.run();
}

void GroupGather::copy_out(const at::Tensor& gathered) {
  const at::Tensor output = unsharded_bytes();
  const auto by_rank = gathered.view({group_.roles().shard_ranks(), sent_bytes()});
  if (splits_rows()) return split_rows(by_rank);
  const bool is_uniform =
      group_.layout().is_uniform && !group_.streams().gather.exists(); // there many copies of pieces are one launch
  CopyList pieces;
  if (!extended_.is_empty()) copy_out_extended(by_rank.narrow(1, group_.layout().shard_bytes, extended_.bytes()));
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& parameter = group_.layout().parameters[i];
    const auto item = static_cast<int64_t>(group_.parameters()[i].leaf.element_size());
    const int64_t bytes = group_.parameters()[i].leaf.numel() * item;
    if (bytes == 0 || parameter.is_replicated() || extended_.contains(i)) continue;
    if (!is_uniform) {
      copy_out_pieces(i, by_rank, pieces);
      continue;
    }
    const auto piece = parameter.pieces[0];
    copy_parts(output, parameter.unsharded_offset, bytes, by_rank, piece.shard_offset, piece.numel * item);
  }
  pieces.run();
}

} // namespace tessera::internal
