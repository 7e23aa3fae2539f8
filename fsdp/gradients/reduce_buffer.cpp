#include <tessera/fsdp/gradients/reduce_buffer.h>

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <tessera/base/current_stream.h>
#include <tessera/base/meta_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/buffers/copy_elements.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/buffers/row_split.h>

namespace tessera::internal {

namespace {

/// The gradient of a parameter that has strides of its own, flattened in their order.
at::Tensor flatten(const at::Tensor& gradient, c10::IntArrayRef strides) {
  if (gradient.strides() == strides) return in_memory_order(gradient);
  return in_memory_order(at::empty_strided(gradient.sizes(), strides, gradient.options()).copy_(gradient));
}

at::Tensor flags_of(const std::vector<bool>& used, const at::TensorOptions& options) {
  const auto count = static_cast<int64_t>(used.size());
  if (std::find(used.begin(), used.end(), false) == used.end()) return at::ones({count}, options);
  const auto flags = at::empty({count}, at::TensorOptions(at::kByte));
  std::copy(used.begin(), used.end(), flags.mutable_data_ptr<uint8_t>());
  return flags.to(options);
}

} // namespace

bool ReduceBuffer::Flags::are(const std::vector<bool>& now, const at::TensorOptions& options) const {
  return now == used && values.defined() && values.dtype() == options.dtype() && stream == current_stream_if_any(values.device());
}

const at::Tensor& ReduceBuffer::Flags::update(const std::vector<bool>& now, const at::TensorOptions& options, int64_t width,
                                              int64_t ranks) {
  if (are(now, options) && values.numel() == ranks * width) return values;
  used = now;
  stream = current_stream_if_any(options.device());
  values = flags_of(used, options);
  const int64_t padding = width - values.numel();
  if (padding > 0) values = at::constant_pad_nd(values, {0, padding});
  if (ranks > 1) values = values.repeat({ranks});
  return values;
}

void ReduceInput::release() {
  users.end();
  data = at::Tensor();
}

void ReduceBuffer::allocate(const ReduceLayout& layout, at::ScalarType dtype) {
  if (is_allocated()) return;
  layout_ = &layout;
  const auto device = group_.roles().mesh().device();
  const int64_t numel = layout.chunk_numel * group_.roles().shard_ranks();
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (const auto& communicator = group_.stages().reduce_scatter()) {
    const MemoryUseScope use(MemoryUse::kReduceBuffer);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, group_.cache().allocate(bytes, communicator.get()));
    input_.data = tensor_over(storage, 0, {numel}, dtype);
  } else { // the gradients lie in it, and live as long as the user likes
    input_.data = at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  input_.users.begin(device);
  is_filled_.assign(group_.parameters().size(), false);
  is_copied_.assign(group_.parameters().size(), false);
  waiting_.assign(group_.parameters().size(), at::Tensor());
}

at::Tensor ReduceBuffer::range(size_t index, size_t rank) const {
  const int64_t offset = static_cast<int64_t>(rank) * layout_->chunk_numel + layout_->offsets[index][rank];
  return flat_range(input_.data, offset, group_.layout().parameters[index].pieces[rank].numel);
}

void ReduceBuffer::add(size_t index, const at::Tensor& gradient) {
  if (!is_asynchronous(gradient.device())) {
    copy_now(index, gradient);
  } else {
    if (waiting_[index].defined()) flush();
    waiting_[index] = gradient;
  }
  is_filled_[index] = true;
}

void ReduceBuffer::add_nothing(size_t index) {
  if (is_filled_[index]) return;
  CopyList list;
  zero(list, index);
  list.run();
  is_filled_[index] = is_copied_[index] = true;
}

at::Tensor ReduceBuffer::rows(const Stretch& stretch) const {
  const auto& [run, offset] = stretch;
  const auto parts = input_.data.view({group_.roles().shard_ranks(), layout_->chunk_numel});
  return parts.narrow(0, run.first, run.ranks).narrow(1, offset, run.range.numel);
}

/// Calls `visit` (tensor flattened or not, rank, whether it is) for each rank's piece, and `visit_rows` (rows of the buffer, rows
/// of the gradient) for many alike.
template <typename Visit, typename VisitRows>
void ReduceBuffer::visit_pieces(size_t index, const at::Tensor& gradient, const Visit& visit, const VisitRows& visit_rows) const {
  const auto& layout = group_.layout().parameters[index];
  const auto strides = group_.parameters()[index].strides.shard();
  const bool is_flat = layout.split_dim == 0 || !strides.empty();
  const auto whole = !strides.empty() ? flatten(gradient, strides) : is_flat ? gradient.contiguous() : gradient;
  for (const auto& stretch : stretches_of(layout.pieces, layout_->offsets[index])) {
    const auto& run = stretch.pieces;
    if (is_flat && run.ranks > kFewRanks) {
      visit_rows(rows(stretch), rows_of(whole, run));
      continue;
    }
    for (int64_t rank = run.first; rank < run.first + run.ranks; ++rank) visit(whole, static_cast<size_t>(rank), is_flat);
  }
}

void ReduceBuffer::copy_now(size_t index, const at::Tensor& gradient) {
  const auto& layout = group_.layout().parameters[index];
  const bool adds = is_filled_[index];
  const auto copy_or_add = [&](const at::Tensor& destination, const at::Tensor& source) {
    if (adds) {
      destination.add_(source);
    } else {
      destination.copy_(source);
    }
  };
  const auto copy_piece = [&](const at::Tensor& whole, size_t rank, bool is_flat) {
    const auto piece = layout.pieces[rank];
    if (is_flat) {
      const int64_t offset = static_cast<int64_t>(rank) * layout_->chunk_numel + layout_->offsets[index][rank];
      return copy_elements(input_.data, offset, whole, piece.begin, piece.numel, adds);
    }
    const auto source = owned_part(whole, layout, rank);
    copy_or_add(range(index, rank).view(source.sizes()), source);
  };
  visit_pieces(index, gradient, copy_piece, copy_or_add);
  is_copied_[index] = true;
}

void ReduceBuffer::collect(CopyList& list, size_t index) {
  const auto gradient = std::exchange(waiting_[index], at::Tensor());
  const auto& layout = group_.layout().parameters[index];
  const auto collect_pair = [&](const at::Tensor& destination, const at::Tensor& source) {
    if (is_copied_[index]) {
      list.sum(destination, source);
    } else {
      list.copy(destination, source);
    }
  };
  const auto collect_piece = [&](const at::Tensor& whole, size_t rank, bool is_flat) {
    const auto piece = layout.pieces[rank];
    if (is_flat) return collect_pair(range(index, rank), flat_range(whole, piece.begin, piece.numel));
    const auto source = owned_part(whole, layout, rank);
    collect_pair(range(index, rank).view(source.sizes()), source);
  };
  visit_pieces(index, gradient, collect_piece, collect_pair);
  is_copied_[index] = true;
}

void ReduceBuffer::flush() {
  if (!is_allocated()) return;
  CopyList list;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i].defined()) collect(list, i);
  }
  list.run();
}

void ReduceBuffer::zero(CopyList& list, size_t index) const {
  for (const auto& stretch : stretches_of(group_.layout().parameters[index].pieces, layout_->offsets[index])) {
    const auto& run = stretch.pieces;
    if (run.ranks > kFewRanks) {
      list.zero(rows(stretch));
      continue;
    }
    for (int64_t rank = run.first; rank < run.first + run.ranks; ++rank) list.zero(range(index, static_cast<size_t>(rank)));
  }
}

void ReduceBuffer::flag(CopyList& list, const std::vector<bool>& used) {
  const auto count = static_cast<int64_t>(used.size());
  if (!is_asynchronous(input_.data.device())) {
    const auto flags =
        input_.data.view({group_.roles().shard_ranks(), layout_->chunk_numel}).narrow(1, layout_->used_offset, count);
    flags.fill_(1);
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i]) flags.select(1, static_cast<int64_t>(i)).zero_();
    }
    return;
  }
  const auto& flags = flags_.update(used, input_.data.options(), count);
  const int64_t ranks = group_.roles().shard_ranks();
  if (ranks > kFewRanks) {
    list.copy(input_.data.view({ranks, layout_->chunk_numel}).narrow(1, layout_->used_offset, count),
              flags.expand({ranks, count}));
    return;
  }
  for (int64_t rank = 0; rank < ranks; ++rank)
    list.copy(flat_range(input_.data, rank * layout_->chunk_numel + layout_->used_offset, count), flags);
}

/// On a device with streams, where pieces are too many for a `CopyList`: the whole gradients of all parameters wait, and fill the
/// buffer by themselves. CUDA's kernel casts from bfloat16 to float alone.
bool ReduceBuffer::can_cat(const std::vector<bool>& takes_part) const {
  const auto& layout = group_.layout();
  if (!is_asynchronous(input_.data.device()) || count_pieces(layout).count <= kMostPairs) return false;
  if (!layout.is_uniform && group_.roles().shard_ranks() > kFewRanks) return false; // too many to be listed
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < takes_part.size(); ++i) {
    const auto& parameter = group_.parameters()[i];
    if (!takes_part[i] || parameter.leaf.numel() == 0) continue;
    const auto& gradient = waiting_[i];
    const bool is_split = !layout.parameters[i].is_replicated() && layout.parameters[i].split_dim == 0;
    if (!gradient.defined() || is_copied_[i] || !is_split || parameter.strides.are_in_shards) return false;
    if (gradient.is_conj() || gradient.is_neg() || gradient.scalar_type() != dtype.value_or(gradient.scalar_type())) return false;
    dtype = gradient.scalar_type();
  }
  const auto to = input_.data.scalar_type();
  return dtype && (dtype == to || (dtype == at::kBFloat16 && to == at::kFloat));
}

/// Fills the buffer by one launch (FSDP2's `_chunk_cat`).
void ReduceBuffer::cat(const std::vector<bool>& takes_part, const std::vector<bool>& used) {
  std::vector<at::Tensor> gradients(waiting_.size());
  for (size_t i = 0; i < waiting_.size(); ++i) {
    const auto gradient = std::exchange(waiting_[i], at::Tensor());
    if (takes_part[i] && gradient.numel() > 0) gradients[i] = gradient.contiguous();
  }
  const int64_t ranks = group_.roles().shard_ranks(), width = layout_->chunk_numel - layout_->used_offset;
  const bool is_uniform = group_.layout().is_uniform;
  const int64_t chunks = is_uniform ? ranks : 1;
  const auto any = std::find_if(gradients.begin(), gradients.end(), [](const auto& each) { return each.defined(); });
  const auto& flags = rows_of_flags_.update(used, any->options(), width, chunks);
  const auto parts = is_uniform ? chunks_of(gradients, flags) : pieces_of(gradients, flags);
  auto rows = input_.data.view({chunks, input_.data.numel() / chunks});
  at::_chunk_cat_out(rows, parts, /*dim=*/0, chunks);
}

/// Each rank's part is a chunk of every gradient, padded, and its row of the flags.
std::vector<at::Tensor> ReduceBuffer::chunks_of(const std::vector<at::Tensor>& gradients, const at::Tensor& flags) const {
  const int64_t ranks = group_.roles().shard_ranks();
  std::vector<at::Tensor> parts;
  int64_t end = 0;
  const auto pad_to = [&](int64_t offset) {
    if (offset > end) parts.push_back(flags.narrow(0, 0, ranks * (offset - end))); // any values
  };
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const int64_t offset = layout_->offsets[i][0];
    pad_to(offset);
    parts.push_back(gradients[i]);
    end = offset + group_.layout().parameters[i].pieces[0].numel;
  }
  pad_to(layout_->used_offset);
  parts.push_back(flags);
  return parts;
}

/// All that lies in the buffer, one behind the other.
std::vector<at::Tensor> ReduceBuffer::pieces_of(const std::vector<at::Tensor>& gradients, const at::Tensor& flags) const {
  std::vector<std::pair<int64_t, at::Tensor>> pieces;
  at::Tensor largest;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& gradient = gradients[i];
    if (!gradient.defined()) continue;
    if (!largest.defined() || gradient.numel() > largest.numel()) largest = gradient;
    for (const auto& [run, offset] : stretches_of(group_.layout().parameters[i].pieces, layout_->offsets[i])) {
      for (int64_t k = 0; k < run.ranks; ++k)
        pieces.emplace_back((run.first + k) * layout_->chunk_numel + offset,
                            flat_range(gradient, run.range.begin + k * run.step, run.range.numel));
    }
  }
  for (int64_t rank = 0; rank < group_.roles().shard_ranks(); ++rank)
    pieces.emplace_back(rank * layout_->chunk_numel + layout_->used_offset, flags);
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });

  std::vector<at::Tensor> parts;
  int64_t end = 0;
  for (auto& [begin, piece] : pieces) {
    for (; end < begin; end += parts.back().numel()) // any values
      parts.push_back(flat_range(largest, 0, std::min(begin - end, largest.numel())));
    end += piece.numel();
    parts.push_back(std::move(piece));
  }
  return parts;
}

ReduceInput ReduceBuffer::take(const std::vector<bool>& takes_part, const std::vector<bool>& used) {
  if (can_cat(takes_part)) {
    cat(takes_part, used);
    return std::exchange(input_, {});
  }
  CopyList list;
  for (size_t i = 0; i < takes_part.size(); ++i) {
    if (waiting_[i].defined()) collect(list, i);
    if (takes_part[i] && !is_filled_[i]) zero(list, i);
  }
  flag(list, used);
  list.run();
  return std::exchange(input_, {});
}

void ReduceBuffer::drop() {
  input_.release();
  waiting_.clear();
}

} // namespace tessera::internal
