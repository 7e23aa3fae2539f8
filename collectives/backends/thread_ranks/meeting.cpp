#include <tessera/collectives/backends/thread_ranks/meeting.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/backends/thread_ranks/exchange_in_memory.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

namespace tessera::internal {

class Meeting::Wait final : public WorkState {
 public:
  Wait(std::shared_ptr<Meeting> meeting, GatheringPtr gathering, int64_t rank, std::string text)
      : meeting_(std::move(meeting)), gathering_(std::move(gathering)), rank_(rank), text_(std::move(text)) {}

  void wait() override {
    meeting_->job_->wait(
        rank_, text_, [&] { return gathering_->is_done; }, [&] { return meeting_->absent(*gathering_); });
    if (!gathering_->failure.empty()) C10_THROW_ERROR(DistBackendError, c10::str(text_, ": ", gathering_->failure));
  }
  bool is_completed() override {
    const std::lock_guard lock(meeting_->job_->mutex());
    return gathering_->is_done;
  }

 private:
  std::shared_ptr<Meeting> meeting_;
  GatheringPtr gathering_;
  int64_t rank_;
  std::string text_;
};

Work Meeting::come(int place, Contribution contribution) {
  std::vector<int> members(static_cast<size_t>(ranks_.size()));
  std::iota(members.begin(), members.end(), 0);
  return join({-1, -1}, members, place, std::move(contribution));
}

Work Meeting::come(int from, int to, int place, Contribution contribution) {
  return join({from, to}, {from, to}, place, std::move(contribution));
}

Work Meeting::join(std::pair<int, int> key, std::vector<int> members, int place, Contribution contribution) {
  const auto text = contribution.text;
  const auto index = static_cast<size_t>(std::find(members.begin(), members.end(), place) - members.begin());
  GatheringPtr gathering;
  bool is_last = false;
  {
    const std::lock_guard lock(job_->mutex());
    check_usable(members, text);
    auto& line = lines_[key];
    line.calls.resize(members.size());
    const auto call = contribution.signature.sequence = line.calls[index]++;
    auto& open = line.open[call];
    if (!open) open = std::make_shared<Gathering>(Gathering{.members = members, .contributions = {}});
    gathering = open;
    gathering->contributions.resize(members.size());
    gathering->contributions[index] = std::move(contribution);
    is_last = ++gathering->came == members.size();
    if (is_last) line.open.erase(call);
  }
  if (is_last) complete(*gathering);
  return Work(std::make_shared<Wait>(shared_from_this(), std::move(gathering), ranks_[place], text));
}

void Meeting::check_usable(const std::vector<int>& members, const std::string& text) const {
  if (!failure_.empty())
    C10_THROW_ERROR(DistBackendError, c10::str(text, ": the group failed before and cannot be used again: ", failure_));
  for (const auto member : members) {
    if (left_.count(member) > 0)
      C10_THROW_ERROR(DistBackendError, c10::str(text, ": rank ", ranks_[member], " has left the group"));
  }
}

void Meeting::leave(int place) {
  const std::lock_guard lock(job_->mutex());
  left_.insert(place);
  for (auto& [key, line] : lines_) {
    for (auto& [call, open] : line.open) {
      if (std::count(open->members.begin(), open->members.end(), place) == 0) continue;
      open->failure = c10::str("rank ", ranks_[place], " has left the group");
      open->is_done = true;
    }
  }
  job_->notify();
}

void Meeting::complete(Gathering& gathering) {
  auto failure = difference(gathering);
  std::vector<Contribution> contributions;
  for (auto& each : gathering.contributions) contributions.push_back(std::move(*each));
  if (failure.empty()) {
    try {
      exchange_in_memory(contributions);
    } catch (const std::exception& error) {
      failure = error_text(error);
    }
  }
  const std::lock_guard lock(job_->mutex());
  gathering.failure = failure;
  gathering.is_done = true;
  if (failure_.empty()) failure_ = failure;
  job_->notify();
}

std::string Meeting::difference(const Gathering& gathering) const {
  std::vector<Signature> signatures;
  std::vector<int64_t> ranks;
  bool is_same = true;
  for (size_t i = 0; i < gathering.members.size(); ++i) {
    signatures.push_back(gathering.contributions[i]->signature);
    ranks.push_back(ranks_[gathering.members[i]]);
    is_same = is_same && signatures[i].same_collective(signatures[0]);
  }
  return is_same ? "" : "the ranks called different collectives:" + describe_signatures(signatures, ranks);
}

std::shared_ptr<Meeting> Meetings::of(const RankList& ranks, const std::string& purpose) {
  const std::lock_guard lock(mutex_);
  auto& known = meetings_[{ranks, purpose}];
  auto found = known.lock();
  if (!found) known = found = std::make_shared<Meeting>(job_, ranks);
  return found;
}

std::vector<int64_t> Meeting::absent(const Gathering& gathering) const {
  std::vector<int64_t> ranks;
  for (size_t i = 0; i < gathering.members.size() && gathering.came < gathering.members.size(); ++i) {
    if (!gathering.contributions[i]) ranks.push_back(ranks_[gathering.members[i]]);
  }
  return ranks;
}

} // namespace tessera::internal
