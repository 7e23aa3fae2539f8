// The gathers of a group: from the shards to the unsharded parameters.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/base/meta_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/collectives/continued_work.h>
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
  if (!memory_ || !has_memory() || is_open() || first_stage() > 0) return;
  if (fetch_.value.defined() && fetch_.version == shard_version()) return;
  fetch_.copy.reset();
  // On a device the copy and its memory are of the stream that gathers from it, and frees it.
  fetch_.last = streams().gather.run([&] {
    const MemoryUseScope use(MemoryUse::kUnsharded);
    const auto bytes = static_cast<int64_t>(shard_.nbytes()), size = whole_pages(bytes) + kPageBytes;
    const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(size), cache().allocate(size));
    const auto destination = from_page(storage, bytes);
    fetch_.copy = memory_->fetch(shard_, destination);
    fetch_.value = destination; // not where the fetch cannot begin
    return Work();
  });
  fetch_.version = shard_version();
}

void ParameterGroup::wait_to_write() {
  users_.join();
  if (!std::exchange(fetch_.last, Work()).is_completed()) streams().gather.synchronize();
}

const at::Tensor& ParameterGroup::fetched_shard() {
  if (!memory_) return shard_;
  start_fetch();
  if (const auto copy = std::exchange(fetch_.copy, nullptr)) {
    const auto fetched = std::exchange(fetch_.value, at::Tensor()); // there is none where this throws
    copy->wait();
    fetch_.value = fetched;
  }
  return fetch_.value;
}

/// What `allocate` returns: memory for a gather.
template <typename Allocate>
auto ParameterGroup::allocate_or_tell(int64_t bytes, const Allocate& allocate) {
  const MemoryUseScope use(MemoryUse::kUnsharded);
  try {
    return allocate();
  } catch (const std::exception& error) {
    tell_failure(c10::str("no memory for the ", bytes, " bytes of ", label(), ": ", error_text(error)));
    throw;
  }
}

c10::DataPtr ParameterGroup::allocate_to_gather(int64_t bytes) {
  return allocate_or_tell(bytes, [&] { return cache().allocate(bytes, stages_.inner_gather().communicator.get()); });
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

/// In place of the gather, which the other ranks call: where they compare what they call, they learn the cause. Those of the
/// first stage do now: the others wait for this rank when they read the parameters, perhaps not yet.
void ParameterGroup::tell_failure(const std::string& failure) {
  // Ranks tell the first characters of what they call: the cause stands at the end of an error.
  const auto cause = failure.rfind(": ");
  const auto told = cause == std::string::npos ? failure : failure.substr(cause + 2) + ": " + failure.substr(0, cause);
  const size_t stage = first_stage();
  if (auto* const sharded = std::get_if<Sharded>(&state_)) sharded->has_told_first = stages_.follows(stage + 1);
  give_up(stages_.gathers[stage].communicator, told);
}

/// Gives up the stages after `stage`, which the other ranks call.
void ParameterGroup::give_up_after(size_t stage, const std::string& cause) const {
  while (stages_.follows(++stage)) give_up(stages_.gathers[stage].communicator, cause);
}

/// Parameter `index` in it.
at::Tensor ParameterGroup::fetched_local(size_t index) const {
  const auto& local = parameters_[index].local;
  if (!fetch_.value.defined()) return local;
  const auto item = static_cast<int64_t>(local.itemsize());
  return tensor_over(fetch_.value.storage(), fetch_.value.storage_offset() + local.storage_offset() * item, local.sizes(),
                     local.scalar_type(), {}, local.strides());
}

size_t ParameterGroup::first_stage() const {
  size_t stage = kept_.size() - 1;
  while (stage > 0 && !is_valid(kept_[stage])) --stage;
  return stage;
}

void ParameterGroup::start_gather() {
  if (is_open()) return;
  TORCH_CHECK(storage_, "the parameters of ", label(), " (", full_name(0),
              ", …) are on the meta device: call tessera::materialize before they are gathered");
  const ProfilerRange range("all_gather", *this);
  const OwnWork own_work{};
  // On a device the block is one of the current stream, although another fills it: the gather comes after what this one holds.
  const bool had_told_first = std::get<Sharded>(state_).has_told_first;
  const auto& stream = streams().gather;
  Gathering gathering;
  try {
    storage_->fill(allocate_to_gather(layout_.unsharded_bytes), layout_.unsharded_bytes);
    gathered_version_ = shard_version();
    gathering.work = stream.run([&] {
      auto work = start_first_stage(gathering);
      gathering.completes_later = !stream.exists() || work.blocks_host();
      if (gathering.completes_later) return work;
      work.wait();
      complete_gather(gathering);
      return Work();
    });
  } catch (...) {
    storage_->release();
    if (had_told_first) give_up_after(gathering.stage, error_text(std::current_exception()));
    throw;
  }
  users_.begin(storage_->device());
  users_.wait_for(gathering.work);
  enter(std::move(gathering));
}

Work ParameterGroup::start_first_stage(Gathering& gathering) {
  const size_t stage = gathering.stage = first_stage();
  auto& kept = kept_[stage];
  if (!stages_.follows(stage)) { // it gathers unsharded parameters as they lie
    kept.users.join();
    return gather_stage(stage, unsharded_bytes_tensor(), kept.value);
  }
  if (stage == 0) try_fetch();
  if (stage == 0 && !extended_.is_empty()) prepare_extended();
  if (layout_.replicated_bytes > 0) fill_replicated(unsharded_bytes_tensor());
  gathering.output = allocate_output();
  const auto& output = output_of(stage, gathering);
  return gather_stage(stage, output, stage == 0 ? own_part_to_send(output) : kept.value);
}

/// On one rank `input` is all there is.
Work ParameterGroup::gather_stage(size_t stage, const at::Tensor& output, const at::Tensor& input) {
  const auto& ranks = stages_.gathers[stage].communicator;
  if (!ranks) {
    if (!input.is_alias_of(output)) output.copy_(input);
    return Work();
  }
  if (!messages_.is_empty() && stages_.follows(stage)) return gather_messages(stage, output, input);
  note_collective(*this, CollectiveKind::kAllGather, output);
  auto work = ranks->all_gather_into(output, input, label());
  note_work(*this, work);
  return work;
}

/// The shard numbers of an inner group are next to each other: what one stage gathers is one peer's in the next.
MessageRanks ParameterGroup::message_ranks(size_t stage) const {
  MessageRanks ranks{.peers = stages_.gathers[stage].ranks(), .own = stages_.gathers[stage].rank()};
  for (size_t before = 0; before < stage; ++before) ranks.each *= stages_.gathers[before].ranks();
  const int64_t all = ranks.each * ranks.peers;
  ranks.first = roles_.shard_rank() / all * all;
  return ranks;
}

int64_t ParameterGroup::gather_payload(size_t stage) const {
  const auto ranks = message_ranks(stage);
  if (messages_.is_empty() || ranks.peers == 1) return ranks.each * ranks.peers * sent_bytes();
  return ranks.peers * messages_.largest(layout_, sent_bytes(), ranks);
}

/// Gathers the messages instead of the bytes. Nothing that they lack is taken from this rank's own part: all ranks read the same.
Work ParameterGroup::gather_messages(size_t stage, const at::Tensor& output, const at::Tensor& input) {
  const auto ranks = message_ranks(stage);
  const auto& communicator = stages_.gathers[stage].communicator;
  const int64_t bytes = messages_.largest(layout_, sent_bytes(), ranks), all = ranks.peers * bytes;
  const c10::Storage storage(c10::Storage::use_byte_size_t(), all,
                             allocate_or_tell(all, [&] { return cache().allocate(all, communicator.get()); }));
  const auto received = tensor_over(storage, 0, {all}, at::kByte),
             sent = tensor_over(storage, ranks.own * bytes, {bytes}, at::kByte);
  messages_.encode(layout_, sent_bytes(), ranks, input, sent);
  note_collective(*this, CollectiveKind::kAllGather, all);
  auto work = communicator->all_gather_into(received, sent, label());
  note_work(*this, work);
  return then(std::move(work),
              [this, ranks, received, output] { messages_.decode(layout_, sent_bytes(), ranks, received, output); });
}

void ParameterGroup::prepare_extended() {
  const auto communicator = stages_.follows(1) ? roles_.shard_communicator() : stages_.gathers[0].communicator;
  extended_.prepare(
      roles_.mesh(), communicator.get(), label(), [&](size_t index) { return fetched_local(index); },
      [&](size_t index) { return full_name(index); });
}

void ParameterGroup::copy_out_extended(const at::Tensor& by_rank) {
  extended_.read(
      by_rank, [&](size_t index) { return whole_parameter(index); }, [&](size_t index) { return full_name(index); });
}

/// Allocates what the shards of all ranks are gathered to.
at::Tensor ParameterGroup::allocate_output() {
  const int64_t bytes = sent_bytes() * roles_.shard_ranks();
  if (layout_.gathers_in_place) return unsharded_bytes_tensor().narrow(0, 0, bytes);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_to_gather(bytes));
  return tensor_over(storage, 0, {bytes}, at::kByte);
}

/// Stage `stage` gathers to the part that the next one starts from, or to the output of all.
const at::Tensor& ParameterGroup::output_of(size_t stage, const Gathering& gathering) {
  if (!stages_.follows(stage + 1)) return gathering.output;
  auto& part = kept_[stage + 1].value;
  if (part.defined()) return part;
  int64_t bytes = gathering.output.numel();
  for (size_t inner = stage + 1; stages_.follows(inner); ++inner) bytes /= stages_.gathers[inner].ranks();
  return part = allocate_or_tell(bytes, [&] { return at::empty({bytes}, gathering.output.options()); });
}

/// What this rank sends in the first stage: its shard, or what is made of it in its place in `output`.
at::Tensor ParameterGroup::own_part_to_send(const at::Tensor& output) {
  if (!shard_plan_.casts) return fetched_shard().narrow(0, 0, layout_.shard_bytes);
  auto part = output.narrow(0, stages_.gathers[0].rank() * sent_bytes(), sent_bytes());
  cast_into(part);
  if (!extended_.is_empty()) extended_.write(part.narrow(0, layout_.shard_bytes, extended_.bytes()));
  return part;
}

void ParameterGroup::finish_gather() {
  auto* const gathering = std::get_if<Gathering>(&state_);
  if (gathering && gathering->completes_later) {
    const ProfilerRange range("all_gather_wait", *this);
    const ExposedTime exposed(*this, &GroupReport::gather_wait_seconds);
    const OwnWork own_work{};
    streams().gather.run([&] { // before any user waits: each waits for what the stream holds then
      wait_for_first_stage(*gathering);
      complete_gather(*gathering);
      return Work();
    });
  }
  users_.join();
  if (gathering) enter(Unsharded());
}

void ParameterGroup::wait_for_first_stage(Gathering& gathering) {
  try {
    gathering.work.wait();
  } catch (const std::exception& error) {
    give_up_after(gathering.stage, error_text(error));
    throw;
  }
}

void ParameterGroup::complete_gather(Gathering& gathering) {
  const bool gathers_unsharded_parts = !stages_.follows(gathering.stage); // with their strides
  try {
    for (size_t next = gathering.stage + 1; stages_.follows(next); ++next) {
      kept_[next].version = gathered_version_;
      gather_stage(next, output_of(next, gathering), kept_[next].value).wait();
      gathering.stage = next;
    }
    const auto gathered = std::exchange(gathering.output, at::Tensor());
    if (!layout_.gathers_in_place && !gathers_unsharded_parts) copy_out(gathered);
  } catch (...) { // of a broken communicator, or a gather extension
    drop_gather();
    throw;
  }
  fetch_.value = at::Tensor();
  if (!gathers_unsharded_parts) restride_gathered();
}

/// As before it began: a later read must not find what was not filled.
void ParameterGroup::drop_gather() {
  try {
    users_.end();
  } catch (...) { // which its reader learns
  }
  storage_->release();
  fetch_.value = at::Tensor();
  state_ = Sharded();
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
  const auto rank = static_cast<size_t>(roles_.shard_rank());
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
  return pieces.count > kMostPairs && (pieces.are_equal || roles_.shard_ranks() <= kFewRanks);
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
  const auto by_rank = gathered.view({roles_.shard_ranks(), sent_bytes()});
  if (splits_rows()) return split_rows(by_rank);
  const bool is_uniform = layout_.is_uniform && !streams().gather.exists(); // there many copies of pieces are one launch
  CopyList pieces;
  if (!extended_.is_empty()) copy_out_extended(by_rank.narrow(1, layout_.shard_bytes, extended_.bytes()));
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
