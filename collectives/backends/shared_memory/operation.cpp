#include <tessera/collectives/backends/shared_memory/operation.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstring>

namespace tessera::internal::shared_memory {

std::string Operation::text() const { return c10::str(to_string(request_.kind), " '", request_.label, "' ", group_); }

bool Operation::publish(Lane& lane, uint64_t sequence) {
  if (sequence >= Lane::kSlots && !lane.all_have(Counter::kFinished, sequence + 1 - Lane::kSlots)) return false;
  sequence_ = sequence;
  request_.signature.sequence = sequence;
  std::memcpy(&lane.signature(lane.self(), sequence), &request_.signature, sizeof(Signature));
  const auto& counts = request_.counts;
  if (!counts.empty()) std::memcpy(lane.counts(lane.self(), sequence), counts.data(), counts.size() * sizeof(counts[0]));
  const auto& input = request_.motion.input;
  lane.location(lane.self(), sequence) = input.count > 0 ? request_.motion.location : kNothing;
  if (input.count > 0 && input.count <= lane.shape().inline_bytes)
    std::memcpy(lane.payload(lane.self(), sequence), input.data, static_cast<size_t>(input.count));
  stage_ = Stage::kPublished;
  lane.set(Counter::kPublished, sequence + 1);
  return true;
}

bool Operation::advance(Lane& lane, const Members& members) {
  if (stage_ == Stage::kMade) return false;
  if (stage_ == Stage::kPublished) {
    if (!lane.all_have(Counter::kPublished, sequence_ + 1)) return false;
    compare_signatures(lane, members.ranks);
    compare_counts(lane, members.ranks);
    transfer_ = make_transfer(lane, request_.motion, sequence_, members.arenas, members.has_left);
    stage_ = Stage::kMoving;
  }
  if (!transfer_->advance()) return false;
  lane.set(Counter::kFinished, sequence_ + 1);
  return true;
}

void Operation::compare_signatures(const Lane& lane, const std::vector<int64_t>& ranks) const {
  bool same = true;
  for (int member = 0; member < lane.size(); ++member)
    same = same && lane.signature(member, sequence_).same_collective(request_.signature);
  if (same) return;
  std::vector<Signature> signatures;
  for (int member = 0; member < lane.size(); ++member) signatures.push_back(lane.signature(member, sequence_));
  TORCH_CHECK(false, text(), ": the ranks of the group called different collectives:", describe_signatures(signatures, ranks));
}

void Operation::compare_counts(const Lane& lane, const std::vector<int64_t>& ranks) const {
  if (!request_.motion.varies) return;
  const int size = lane.size();
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const auto sent = lane.counts(from, sequence_)[to], expected = lane.counts(to, sequence_)[size + from];
      TORCH_CHECK(sent == expected, text(), ": rank ", ranks[from], " sends ", sent, " bytes to rank ", ranks[to],
                  ", which expects ", expected, " from it");
    }
  }
}

std::vector<int> Operation::absent(const Lane& lane) const {
  switch (stage_) {
    case Stage::kMade: return lane.those_behind(Counter::kFinished, lane.own(Counter::kPublished) + 1 - Lane::kSlots);
    case Stage::kPublished: return lane.those_behind(Counter::kPublished, sequence_ + 1);
    case Stage::kMoving: return transfer_->absent();
  }
  return {};
}

std::string Operation::awaited(const std::vector<int64_t>& absent, bool of_whole_group) const {
  const auto list = c10::str(absent.size() == 1 ? "rank " : "ranks ", c10::Join(", ", absent));
  if (stage_ == Stage::kMoving) return "the payload of " + list;
  return c10::str("the call of ", list, of_whole_group ? ": every rank of the group must call it" : "");
}

void Operation::complete() {
  transfer_.reset();
  request_.tensors = {};
  done_ = true;
}

void Operation::fail(std::exception_ptr why, std::optional<Absence> absence) {
  failure = std::move(why);
  unexplained = std::move(absence);
  done_ = true;
}

} // namespace tessera::internal::shared_memory
