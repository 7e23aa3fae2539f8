// The gathers of a group: from the shards to the unsharded parameters.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/buffers/copy_elements.h>
#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/buffers/own_work.h>
#include <tessera/fsdp/buffers/row_split.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/group/profiler_range.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

void ParameterGroup::start_fetch() {
  if (!memory_ || !has_memory() || state_ != State::kSharded || is_secondary_valid()) return;
  if (fetched_.defined() && fetched_version_ == shard_version()) return;
  fetch_.reset();
  // On a device the copy and its memory are of the stream that gathers from it, and frees it.
  fetching_ = streams().gather.run([&] {
    const auto bytes = static_cast<int64_t>(shard_.nbytes()), size = whole_pages(bytes) + kPageBytes;
    const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(size), cache().allocate(size));
    const auto destination = from_page(storage, bytes);
    fetch_ = memory_->fetch(shard_, destination);
    fetched_ = destination; // not where the fetch cannot begin
    return Work();
  });
  fetched_version_ = shard_version();
}

void ParameterGroup::wait_to_write() {
  users_.join();
  if (!std::exchange(fetching_, Work()).is_completed()) streams().gather.synchronize();
}

const at::Tensor& ParameterGroup::fetched_shard() {
  if (!memory_) return shard_;
  start_fetch();
  if (const auto fetch = std::exchange(fetch_, nullptr)) {
    const auto fetched = std::exchange(fetched_, at::Tensor()); // there is none where this throws
    fetch->wait();
    fetched_ = fetched;
  }
  return fetched_;
}

/// What `allocate` returns: memory for a gather.
template <typename Allocate>
auto ParameterGroup::allocate_or_tell(int64_t bytes, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception& error) {
    tell_failure(c10::str("no memory for the ", bytes, " bytes of ", label(), ": ", error_text(error)));
    throw;
  }
}

c10::DataPtr ParameterGroup::allocate_to_gather(int64_t bytes) {
  return allocate_or_tell(bytes, [&] { return cache().allocate(bytes, axes_.all_gather().get()); });
}

/// What fails on this rank ends the gather on the others, which would wait for it.
void ParameterGroup::try_fetch() {
  try {
    fetched_shard();
  } catch (const std::exception& error) {
    tell_failure(error_text(error));
    throw;
  }
}

namespace {

void give_up(const CommunicatorPtr& communicator, const std::string& cause) {
  if (!communicator) return;
  try {
    communicator->give_up(cause);
  } catch (const std::exception&) { // as on every rank
  }
}

} // namespace

/// In place of the gather, which the other ranks call: where they compare what they call, they learn the cause. Between groups
/// first: the ranks of this one's own wait for it when they read the parameters, perhaps not yet.
void ParameterGroup::tell_failure(const std::string& failure) {
  // Ranks tell the first characters of what they call: the cause stands at the end of an error.
  const auto cause = failure.rfind(": ");
  const auto told = cause == std::string::npos ? failure : failure.substr(cause + 2) + ": " + failure.substr(0, cause);
  if (neighbours_ && is_secondary_valid()) return give_up(neighbours_, told);
  has_told_outer_ = axes_.outer_all_gather() && !is_secondary_valid();
  give_up(has_told_outer_ ? axes_.outer_all_gather() : axes_.all_gather(), told);
}

/// Parameter `index` in it.
at::Tensor ParameterGroup::fetched_local(size_t index) const {
  const auto& local = parameters_[index].local;
  if (!fetched_.defined()) return local;
  const auto item = static_cast<int64_t>(local.itemsize());
  return tensor_over(fetched_.storage(), fetched_.storage_offset() + local.storage_offset() * item, local.sizes(),
                     local.scalar_type(), {}, local.strides());
}

void ParameterGroup::start_gather() {
  if (state_ != State::kSharded) return;
  TORCH_CHECK(storage_, "the parameters of ", label(), " (", full_name(0),
              ", …) are on the meta device: call tessera::materialize before they are gathered");
  const ProfilerRange range("all_gather", *this);
  const OwnWork own_work{};
  // On a device the block is one of the current stream, although another fills it: the gather comes after what this one holds,
  // such as the last reads of the group whose block it is.
  const bool had_told_outer = has_told_outer_;
  const auto& stream = streams().gather;
  try {
    storage_->fill(allocate_to_gather(layout_.unsharded_bytes), layout_.unsharded_bytes);
    gathered_version_ = shard_version();
    gather_ = stream.run([&] {
      auto work = gather(unsharded_bytes_tensor());
      completes_later_ = !stream.exists() || work.blocks_host();
      if (completes_later_) return work;
      work.wait();
      complete_gather();
      return Work();
    });
  } catch (...) {
    release_gathered();
    if (had_told_outer) give_up(axes_.all_gather(), error_text(std::current_exception()));
    throw;
  }
  users_.begin(storage_->device());
  users_.wait_for(gather_);
  enter(State::kGathering);
}

Work ParameterGroup::gather(const at::Tensor& unsharded) {
  gathers_unsharded_parts_ = neighbours_ && is_secondary_valid();
  if (gathers_unsharded_parts_) {
    secondary_users_.join();
    return all_gather(*neighbours_, unsharded, secondary_);
  }
  if (!is_secondary_valid()) try_fetch();
  if (!is_secondary_valid() && !extended_.is_empty()) prepare_extended();
  fill_replicated(unsharded);
  const auto output = allocate_output(unsharded);
  return is_secondary_valid() ? gather_inside(output, secondary_) : gather_shards(output);
}

Work ParameterGroup::all_gather(Communicator& ranks, const at::Tensor& output, const at::Tensor& input) const {
  note_collective(*this, CollectiveKind::kAllGather, output);
  auto work = ranks.all_gather_into(output, input, label());
  note_work(*this, work);
  return work;
}

void ParameterGroup::prepare_extended() {
  const auto communicator = axes_.outer_all_gather() ? axes_.mesh().communicator(0) : axes_.all_gather();
  extended_bytes_ = extended_.prepare(
      axes_.mesh(), communicator.get(), label(), [&](size_t index) { return fetched_local(index); },
      [&](size_t index) { return full_name(index); });
}

void ParameterGroup::copy_out_extended(const at::Tensor& by_rank) {
  extended_.read(
      by_rank, [&](size_t index) { return whole_parameter(index); }, [&](size_t index) { return full_name(index); });
}

at::Tensor ParameterGroup::allocate_output(const at::Tensor& unsharded) {
  const int64_t bytes = sent_bytes() * axes_.shard_ranks();
  if (layout_.gathers_in_place) return unsharded.narrow(0, 0, bytes);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_to_gather(bytes));
  return gather_output_ = tensor_over(storage, 0, {bytes}, at::kByte);
}

/// Gathers from the shards of all ranks; where the strategy is hierarchical, first those of this rank's inner part, into
/// `secondary_`.
Work ParameterGroup::gather_shards(const at::Tensor& output) {
  const auto& outer = axes_.outer_all_gather();
  auto gathered = output;
  int64_t place = axes_.shard_rank();
  if (outer) {
    const int64_t bytes = axes_.outer_ranks() * sent_bytes();
    if (!secondary_.defined()) secondary_ = allocate_or_tell(bytes, [&] { return at::empty({bytes}, output.options()); });
    gathered = secondary_;
    place = outer->rank();
  }
  auto input = fetched_shard().narrow(0, 0, shard_plan_.casts ? 0 : layout_.shard_bytes);
  if (shard_plan_.casts) {
    input = gathered.narrow(0, place * sent_bytes(), sent_bytes());
    cast_into(input);
    if (!extended_.is_empty()) extended_.write(input.narrow(0, layout_.shard_bytes, extended_bytes_));
  }
  if (!outer) return gather_inside(gathered, input);
  inner_output_ = output;
  return all_gather(*outer, gathered, input);
}

/// Gathers inside the inner group, or along the whole shard axis. On one rank `input` is all there is.
Work ParameterGroup::gather_inside(const at::Tensor& output, const at::Tensor& input) {
  if (const auto& inner = axes_.all_gather()) return all_gather(*inner, output, input);
  if (!input.is_alias_of(output)) output.copy_(input);
  return Work();
}

void ParameterGroup::finish_gather() {
  if (state_ == State::kGathering && completes_later_) {
    const ProfilerRange range("all_gather_wait", *this);
    const ExposedTime exposed(*this, &GroupReport::gather_wait_seconds);
    const OwnWork own_work{};
    streams().gather.run([&] { // before any user waits: each waits for what the stream holds then
      wait_for_first_collective();
      complete_gather();
      return Work();
    });
  }
  users_.join();
  if (state_ != State::kGathering) return;
  gather_ = Work();
  enter(State::kUnsharded);
}

void ParameterGroup::wait_for_first_collective() {
  try {
    gather_.wait();
  } catch (const std::exception& error) {
    if (inner_output_.defined()) give_up(axes_.all_gather(), error_text(error)); // in place of the second, which the others call
    throw;
  }
}

void ParameterGroup::complete_gather() {
  try {
    if (inner_output_.defined()) {
      secondary_version_ = gathered_version_;
      gather_inside(std::exchange(inner_output_, at::Tensor()), secondary_).wait();
    }
    if (gather_output_.defined()) copy_out(std::exchange(gather_output_, at::Tensor()));
  } catch (...) { // of a broken communicator, or a gather extension
    drop_gather();
    throw;
  }
  fetched_ = at::Tensor();
  if (!gathers_unsharded_parts_) restride_gathered();
}

/// As before it began: a later read must not find what was not filled.
void ParameterGroup::drop_gather() {
  try {
    users_.end();
  } catch (...) { // which its reader learns
  }
  release_gathered();
  fetched_ = at::Tensor();
  state_ = State::kSharded;
}

void ParameterGroup::release_gathered() {
  storage_->release();
  inner_output_ = at::Tensor();
  gather_output_ = at::Tensor();
}

void ParameterGroup::restride_gathered() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    if (!parameter.strides.empty() && !parameter.has_strided_shards && !extended_.contains(i))
      whole_parameter(i).copy_(row_major_parameter(i).clone());
  }
}

void ParameterGroup::fill_replicated(const at::Tensor& unsharded) {
  CopyList copies;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& layout = layout_.parameters[i];
    if (!layout.is_replicated()) continue;
    copies.copy(flat_view(unsharded, layout.unsharded_offset, 1, parameters_[i].leaf.scalar_type()), fetched_local(i).view({-1}));
  }
  copies.run();
}

void ParameterGroup::cast_into(const at::Tensor& destination) {
  if (shard_plan_.casts_whole) {
    const auto& any = parameters_[0];
    const auto numel = layout_.shard_bytes / static_cast<int64_t>(c10::elementSize(any.unsharded_dtype));
    flat_view(destination, 0, numel, any.unsharded_dtype).copy_(flat_view(fetched_shard(), 0, numel, any.spec->dtype()));
    return;
  }
  CopyList copies;
  const auto rank = static_cast<size_t>(axes_.shard_rank());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto piece = layout_.parameters[i].pieces[rank];
    if (piece.numel == 0 || layout_.parameters[i].is_replicated() || extended_.contains(i)) continue;
    copies.copy(flat_view(destination, piece.shard_offset, piece.numel, parameters_[i].leaf.scalar_type()),
                in_memory_order(fetched_local(i)));
  }
  copies.run();
}

void ParameterGroup::copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies) {
  const auto& layout = layout_.parameters[index];
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
bool ParameterGroup::splits_rows() const {
  if (!layout_.is_uniform || !streams().gather.exists() || !extended_.is_empty()) return false;
  const auto pieces = count_pieces(layout_);
  return pieces.count > kMostPairs && (pieces.are_equal || axes_.shard_ranks() <= kFewRanks);
}

/// All ranks' pieces of a parameter at once, where they are equal; otherwise each by itself.
void ParameterGroup::split_rows(const at::Tensor& by_rank) {
  const bool is_even = count_pieces(layout_).are_equal;
  const int64_t ranks = by_rank.size(0), width = by_rank.size(1), parts = is_even ? 1 : ranks;
  const auto output = unsharded_bytes_tensor();
  RowSplit split(by_rank.view({ranks / parts, parts * width}));
  for (int64_t rank = 0; rank < parts; ++rank) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& parameter = layout_.parameters[i];
      const auto piece = parameter.pieces[static_cast<size_t>(rank)];
      if (piece.numel == 0 || parameter.is_replicated()) continue;
      const auto item = static_cast<int64_t>(parameters_[i].leaf.element_size());
      const int64_t place = parameter.unsharded_offset + piece.begin * item;
      split.copy(rank * width + piece.shard_offset,
                 tensor_over(output.storage(), place, {ranks / parts, piece.numel * item}, at::kByte));
    }
  }
  split.run();
}

void ParameterGroup::copy_out(const at::Tensor& gathered) {
  const at::Tensor output = unsharded_bytes_tensor();
  const auto by_rank = gathered.view({axes_.shard_ranks(), sent_bytes()});
  if (splits_rows()) return split_rows(by_rank);
  const bool is_uniform = layout_.is_uniform && !streams().gather.exists(); // there many copies of pieces are one launch
  CopyList pieces;
  if (!extended_.is_empty()) copy_out_extended(by_rank.narrow(1, layout_.shard_bytes, extended_bytes_));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = layout_.parameters[i];
    const auto item = static_cast<int64_t>(parameters_[i].leaf.element_size());
    const int64_t bytes = parameters_[i].leaf.numel() * item;
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
