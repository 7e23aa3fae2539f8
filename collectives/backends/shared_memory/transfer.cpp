#include <tessera/collectives/backends/shared_memory/transfer.h>

#include <tessera/base/stream_copy.h>
#include <tessera/collectives/sums/reduce.h>

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace tessera::internal::shared_memory {

namespace {

constexpr int64_t kUnitAlignment = 64; // bytes; a multiple of every element's size

/// What both kinds know of a call.
class TransferOfMotion : public Transfer {
 public:
  TransferOfMotion(Lane& lane, const Motion& motion, uint64_t call)
      : lane_(lane), motion_(motion), call_(call), size_(lane.size()), self_(lane.self()) {}

 protected:
  bool sends_to_each() const { return !motion_.send.empty() || motion_.kind == Motion::Kind::kReduceScatter; }

  // The offset of the part for this member in what `from` contributes.
  int64_t offset_in(int from) const {
    if (motion_.kind == Motion::Kind::kReduceScatter) // at the same place on all members
      return motion_.send.empty() ? self_ * motion_.output.count : motion_.send[self_].data - motion_.input.data;
    if (!sends_to_each()) return 0;
    int64_t offset = 0;
    for (int to = 0; to < self_; ++to) offset += lane_.counts(from, call_)[to];
    return offset;
  }

  void reduce_into(char* output, const std::vector<const void*>& inputs, int64_t bytes, Writes writes) const {
    const auto width = static_cast<int64_t>(c10::elementSize(motion_.dtype));
    if (bytes > 0) reduce(output, inputs, bytes / width, motion_.dtype, motion_.op, writes);
  }

  Lane& lane_;
  const Motion& motion_;
  const uint64_t call_;
  const int size_, self_;
};

/// Every input lies in its member's slot.
class SlotTransfer final : public TransferOfMotion {
 public:
  using TransferOfMotion::TransferOfMotion;

  bool advance() override {
    switch (motion_.kind) {
      case Motion::Kind::kNothing: break;
      case Motion::Kind::kCopies:
        for (int from = 0; from < size_; ++from) copy_from(from);
        break;
      case Motion::Kind::kReduceScatter:
      case Motion::Kind::kAllReduce: reduce_parts(); break;
    }
    return true;
  }

 private:
  void copy_from(int from) const {
    const auto& receive = motion_.receive[from];
    copy(receive.data, lane_.payload(from, call_) + offset_in(from), receive.count, Writes::kThroughCache);
  }

  void reduce_parts() const {
    std::vector<const void*> inputs(size_);
    for (int from = 0; from < size_; ++from) inputs[from] = lane_.payload(from, call_) + offset_in(from);
    reduce_into(motion_.output.data, inputs, motion_.output.count, Writes::kThroughCache);
  }
};

/// Every input is read where it lies, in its member's arena. A tick says that this member has read what it needs.
class ArenaTransfer final : public TransferOfMotion {
 public:
  ArenaTransfer(Lane& lane, const Motion& motion, uint64_t call, const std::vector<char*>& arenas,
                const std::function<bool(int member)>& has_left)
      : TransferOfMotion(lane, motion, call), arenas_(arenas), has_left_(has_left), first_tick_(lane.own(Counter::kTicks)) {}

  bool advance() override {
    const int64_t ticks = motion_.kind == Motion::Kind::kAllReduce ? 2 : 1;
    while (lost_.empty()) {
      if (tick_ > 0 && !lane_.all_have(Counter::kTicks, first_tick_ + tick_)) return false;
      if (tick_ == ticks) return true;
      move();
      lost_ = those_who_left();
      if (lost_.empty()) lane_.set(Counter::kTicks, first_tick_ + ++tick_);
    }
    return false;
  }
  std::vector<int> absent() const override {
    return lost_.empty() ? lane_.those_behind(Counter::kTicks, first_tick_ + tick_) : lost_;
  }

 private:
  char* input_of(int from) const { return from == self_ ? motion_.input.data : arenas_[from] + lane_.location(from, call_); }

  void move() const {
    switch (motion_.kind) {
      case Motion::Kind::kNothing: return;
      case Motion::Kind::kCopies: return copy_all();
      case Motion::Kind::kReduceScatter: return reduce_at(offset_in(self_), motion_.output);
      case Motion::Kind::kAllReduce:
        return tick_ == 0 ? reduce_at(unit_of(self_).data - motion_.output.data, unit_of(self_)) : gather_units();
    }
  }

  // Asked after their inputs were read: who leaves before all have read it has failed, and may have freed or overwritten it.
  std::vector<int> those_who_left() const {
    std::atomic_thread_fence(std::memory_order_acquire); // the reads of the inputs come first
    std::vector<int> left;
    for (int from = 0; from < size_; ++from)
      if (from != self_ && lane_.location(from, call_) != kNothing && has_left_(from)) left.push_back(from);
    return left;
  }

  void copy_all() const {
    const auto writes = writes_of(size_ * motion_.largest_input);
    for (int step = 0; step < size_; ++step) {
      const int from = (self_ + step) % size_;
      const auto& receive = motion_.receive[from];
      if (receive.count > 0) copy(receive.data, input_of(from) + offset_in(from), receive.count, writes);
    }
  }
  void reduce_at(int64_t offset, const Part& output) const {
    std::vector<const void*> inputs(size_);
    for (int from = 0; from < size_; ++from) inputs[from] = input_of(from) + offset;
    reduce_into(output.data, inputs, output.count, writes_of(output.count));
  }

  // What one member reduces of an all-reduce.
  Part unit_of(int member) const {
    const auto& whole = motion_.output;
    const auto unit = (whole.count / size_ + kUnitAlignment) / kUnitAlignment * kUnitAlignment;
    const auto begin = std::min(member * unit, whole.count);
    return {whole.data + begin, std::min(unit, whole.count - begin)};
  }
  void gather_units() const {
    for (int step = 1; step < size_; ++step) {
      const int from = (self_ + step) % size_;
      const auto unit = unit_of(from);
      copy(unit.data, input_of(from) + (unit.data - motion_.output.data), unit.count, writes_of(motion_.output.count));
    }
  }

  const std::vector<char*>& arenas_;
  const std::function<bool(int member)>& has_left_;
  const uint64_t first_tick_;
  int64_t tick_ = 0;
  std::vector<int> lost_; ///< members that left before this one had read their input
};

/// Inputs go through the members' chunks, in ticks: in each one every member shows a piece of its input, and reads those that
/// the others showed in the tick before. Pieces stay in the cache between the two.
class ChunkTransfer : public TransferOfMotion {
 public:
  ChunkTransfer(Lane& lane, const Motion& motion, uint64_t call, int64_t longest)
      : TransferOfMotion(lane, motion, call),
        first_tick_(lane.own(Counter::kTicks)),
        unit_(sends_to_each() ? lane.shape().chunk_bytes / size_ / kUnitAlignment * kUnitAlignment : lane.shape().chunk_bytes),
        pieces_((longest + unit_ - 1) / unit_) {}

  bool advance() override {
    while (true) {
      if (!has_shown_ && tick_ < pieces_) {
        show(tick_);
        lane_.set(Counter::kTicks, first_tick_ + tick_ + 1);
      }
      has_shown_ = true;
      if (tick_ > 0) {
        if (!lane_.all_have(Counter::kTicks, first_tick_ + tick_)) return false;
        read(tick_ - 1);
      }
      if (tick_ == pieces_) return true;
      ++tick_;
      has_shown_ = false;
    }
  }

  std::vector<int> absent() const override { return lane_.those_behind(Counter::kTicks, first_tick_ + tick_); }

 private:
  char* chunk(int member, int64_t piece) const { return lane_.chunk(member, first_tick_ + piece); }
  /// The `piece`-th unit of it.
  Part unit_of(const Part& whole, int64_t piece) const {
    const auto begin = std::min(piece * unit_, whole.count);
    return {whole.data + begin, std::min(unit_, whole.count - begin)};
  }
  Part part_for(int to) const {
    if (!motion_.send.empty()) return motion_.send[to];
    if (motion_.kind == Motion::Kind::kReduceScatter)
      return {motion_.input.data + to * motion_.output.count, motion_.output.count};
    return motion_.input;
  }

  void show(int64_t piece) const {
    if (motion_.kind == Motion::Kind::kCopies && motion_.receive[self_].count > 0) {
      const auto own = unit_of(motion_.receive[self_], piece);
      copy(own.data, unit_of(part_for(self_), piece).data, own.count, writes_);
    }
    if (!sends_to_each()) return show_unit(motion_.input, chunk(self_, piece), piece);
    for (int to = 0; to < size_; ++to)
      if (to != self_) show_unit(part_for(to), chunk(self_, piece) + to * unit_, piece);
  }
  void show_unit(const Part& part, char* place, int64_t piece) const {
    const auto unit = unit_of(part, piece);
    copy(place, unit.data, unit.count, Writes::kThroughCache);
  }

  void read(int64_t piece) const {
    if (motion_.kind == Motion::Kind::kReduceScatter) return reduce_units(piece);
    for (int step = 1; step < size_; ++step) {
      const int from = (self_ + step) % size_;
      const auto unit = unit_of(motion_.receive[from], piece);
      copy(unit.data, chunk(from, piece) + (sends_to_each() ? self_ * unit_ : 0), unit.count, writes_);
    }
  }
  void reduce_units(int64_t piece) const {
    std::vector<const void*> inputs(size_);
    for (int from = 0; from < size_; ++from) inputs[from] = chunk(from, piece) + self_ * unit_;
    inputs[self_] = unit_of(part_for(self_), piece).data;
    const auto unit = unit_of(motion_.output, piece);
    reduce_into(unit.data, inputs, unit.count, writes_);
  }

  const uint64_t first_tick_;
  const int64_t unit_, pieces_;
  const Writes writes_ = writes_of(size_ * motion_.largest_input);
  int64_t tick_ = 0;
  bool has_shown_ = false;
};

/// As above, with a step between: each member reduces its unit of every piece and shows the result in the same chunk.
class ChunkAllReduce final : public TransferOfMotion {
 public:
  ChunkAllReduce(Lane& lane, const Motion& motion, uint64_t call)
      : TransferOfMotion(lane, motion, call),
        first_tick_(lane.own(Counter::kTicks)),
        unit_(lane.shape().chunk_bytes / size_ / kUnitAlignment * kUnitAlignment),
        pieces_((motion.output.count + size_ * unit_ - 1) / (size_ * unit_)) {}

  bool advance() override {
    while (true) {
      if (!has_shown_ && tick_ < pieces_) show(tick_);
      has_shown_ = true;
      if (tick_ > 0) {
        if (!lane_.all_have(Counter::kTicks, first_tick_ + tick_)) return false;
        if (tick_ <= pieces_) reduce_own(tick_ - 1);
        if (tick_ > 1) read(tick_ - 2);
      }
      if (tick_ == pieces_ + 1) return true;
      ++tick_;
      has_shown_ = false;
      lane_.set(Counter::kTicks, first_tick_ + tick_);
    }
  }

  std::vector<int> absent() const override { return lane_.those_behind(Counter::kTicks, first_tick_ + tick_); }

 private:
  char* place_of(int member, int unit, int64_t piece) const { return lane_.chunk(member, first_tick_ + piece) + unit * unit_; }
  Part unit_of(int unit, int64_t piece) const {
    const auto begin = std::min((piece * size_ + unit) * unit_, motion_.output.count);
    return {motion_.output.data + begin, std::min(unit_, motion_.output.count - begin)};
  }

  void show(int64_t piece) const {
    for (int to = 0; to < size_; ++to) {
      const auto unit = unit_of(to, piece);
      if (to != self_) copy(place_of(self_, to, piece), unit.data, unit.count, Writes::kThroughCache);
    }
  }
  void reduce_own(int64_t piece) const {
    constexpr int64_t kBlock = 8192; // bytes: its result is in the first-level cache when it is copied
    const auto unit = unit_of(self_, piece);
    std::vector<const void*> inputs(size_);
    for (int64_t begin = 0; begin < unit.count; begin += kBlock) {
      for (int from = 0; from < size_; ++from) inputs[from] = place_of(from, self_, piece) + begin;
      inputs[self_] = unit.data + begin;
      auto* const result = place_of(self_, self_, piece) + begin;
      const auto count = std::min(kBlock, unit.count - begin);
      reduce_into(result, inputs, count, Writes::kThroughCache);
      copy(unit.data + begin, result, count, Writes::kThroughCache);
    }
  }
  void read(int64_t piece) const {
    for (int step = 1; step < size_; ++step) {
      const int from = (self_ + step) % size_;
      const auto unit = unit_of(from, piece);
      copy(unit.data, place_of(from, from, piece), unit.count, Writes::kThroughCache);
    }
  }

  const uint64_t first_tick_;
  const int64_t unit_, pieces_;
  int64_t tick_ = 0;
  bool has_shown_ = false;
};

/// The most bytes that one member contributes, and the most that it sends to one other.
std::pair<int64_t, int64_t> longest_of(const Lane& lane, const Motion& motion, uint64_t call) {
  if (motion.kind == Motion::Kind::kReduceScatter) return {motion.largest_input, motion.output.count};
  if (!motion.varies) return {motion.largest_input, motion.largest_input};
  int64_t largest = 0, longest = 0;
  for (int from = 0; from < lane.size(); ++from) {
    int64_t sum = 0;
    for (int to = 0; to < lane.size(); ++to) {
      const auto count = lane.counts(from, call)[to];
      longest = std::max(longest, count);
      sum += count;
    }
    largest = std::max(largest, sum);
  }
  return {largest, longest};
}

bool all_in_arenas(const Lane& lane, uint64_t call, const std::vector<char*>& arenas) {
  if (arenas.empty()) return false;
  for (int member = 0; member < lane.size(); ++member)
    if (lane.location(member, call) == kNowhere) return false;
  return true;
}

} // namespace

std::unique_ptr<Transfer> make_transfer(Lane& lane, const Motion& motion, uint64_t call, const std::vector<char*>& arenas,
                                        const std::function<bool(int member)>& has_left) {
  const auto [largest, longest] = longest_of(lane, motion, call);
  if (largest <= lane.shape().inline_bytes) return std::make_unique<SlotTransfer>(lane, motion, call);
  if (all_in_arenas(lane, call, arenas)) return std::make_unique<ArenaTransfer>(lane, motion, call, arenas, has_left);
  if (motion.kind == Motion::Kind::kAllReduce) return std::make_unique<ChunkAllReduce>(lane, motion, call);
  return std::make_unique<ChunkTransfer>(lane, motion, call, longest);
}

} // namespace tessera::internal::shared_memory
