#include <tessera/collectives/ranks/rank_watch.h>

#include <tessera/base/descriptors.h>
#include <tessera/base/host_name.h>
#include <tessera/base/time_limit.h>

#include <absl/algorithm/container.h>
#include <c10/util/StringUtil.h>

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <thread>

namespace tessera::internal {

namespace {

constexpr const char* kEndedRanksKey = "tessera/ended";
constexpr const char* kFirstMissingKey = "first_missing";
constexpr std::chrono::seconds kStoreLimit(2); // the store may be what is missing
constexpr std::chrono::milliseconds kRecordGrace(400), kRecordInterval(50);

// Process ids mean the same in processes with an equal scope: of one running kernel, and in one namespace. Empty where that
// cannot be told.
std::string process_scope() {
  const auto boot = boot_id(), name = host_name();
  struct stat space = {};
  if (boot.empty() || name.empty() || stat("/proc/self/ns/pid", &space) != 0) return "";
  return c10::str(name, "/", boot, "/", space.st_ino, "/");
}

int open_process(int id) { return static_cast<int>(syscall(SYS_pidfd_open, id, 0)); } // glibc 2.36 declares it for C only

// Of a process that ends at this moment, kernels say one or the other.
bool means_no_process(int error) { return error == ESRCH || error == EINVAL || error == ENOENT; }

bool is_readable(int descriptor) {
  pollfd polled{descriptor, POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

std::string missed_by_key(int64_t rank) { return c10::str("missed_by/", rank); }
// A group's part of the store has who left it, and that anybody did.
std::string departed_key(int64_t rank) { return c10::str("departed/", rank); }
constexpr const char* kDepartedKey = "departed";

} // namespace

std::string list_of_ranks(const std::vector<int64_t>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

std::string describe_ended(const std::vector<int64_t>& ranks) {
  return c10::str(list_of_ranks(ranks), ", which ", ranks.size() == 1 ? "has" : "have", " exited or failed");
}

void add_ended_rank(c10d::Store& job_store, int64_t rank) {
  const auto text = c10::str(rank, " ");
  job_store.append(kEndedRanksKey, {text.begin(), text.end()});
}

std::vector<int64_t> ended_ranks(c10d::Store& job_store) {
  if (!job_store.check({kEndedRanksKey})) return {};
  std::istringstream text(job_store.get_to_str(kEndedRanksKey));
  return {std::istream_iterator<int64_t>(text), {}};
}

std::string MissingRank::encode() const { return c10::str(static_cast<char>(reason), rank); }

std::optional<MissingRank> MissingRank::decode(std::string_view text) {
  MissingRank missing;
  if (text.empty() || std::string_view("etw").find(text[0]) == std::string_view::npos) return std::nullopt;
  missing.reason = static_cast<Reason>(text[0]);
  const auto* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data() + 1, end, missing.rank);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return missing;
}

RankWatch::RankWatch(int64_t rank, const std::vector<std::string>& processes, c10::intrusive_ptr<c10d::Store> store,
                     c10::intrusive_ptr<c10d::Store> job_store)
    : rank_(rank),
      store_(std::move(store)),
      job_store_(std::move(job_store)),
      ids_(processes.size()),
      processes_(processes.size(), kUnseen) {
  const auto scope = process_scope();
  if (scope.empty()) return;
  const auto is_here = [&](const std::string& process) { return process.starts_with(scope); };
  processes_here_ = static_cast<int>(absl::c_count_if(processes, is_here));
  gloo::reserve_descriptors(processes_here_);
  for (size_t other = 0; other < processes.size(); ++other)
    if (is_here(processes[other])) {
      ids_[other] = std::atoi(processes[other].c_str() + scope.size());
      if (static_cast<int64_t>(other) == rank) continue;
      const int process = open_process(ids_[other]);
      processes_[other] = process >= 0 ? process : means_no_process(errno) ? kGone : kUnseen;
    }
}

RankWatch::~RankWatch() {
  for (const int process : processes_)
    if (process >= 0) close(process);
}

std::string RankWatch::own_process() {
  static const auto anywhere = c10::str("?", std::random_device()(), "/"); // no host has such a name
  const auto scope = process_scope();
  return c10::str(scope.empty() ? anywhere : scope, getpid());
}

bool RankWatch::has_ended_here(const std::string& process) {
  const auto scope = process_scope();
  return !scope.empty() && process.starts_with(scope) && kill(std::atoi(process.c_str() + scope.size()), 0) != 0 &&
         errno == ESRCH;
}

std::optional<pid_t> RankWatch::process_here(int64_t rank) const {
  return ids_[rank] != 0 ? std::optional(ids_[rank]) : std::nullopt;
}

bool RankWatch::sees_end_of(int64_t rank) const { return rank == rank_ || processes_[rank] != kUnseen; }

bool RankWatch::has_ended(int64_t rank) const {
  return processes_[rank] == kGone || (processes_[rank] >= 0 && is_readable(processes_[rank]));
}

void RankWatch::add_witness(std::weak_ptr<Witness> witness) {
  const std::lock_guard lock(witnesses_mutex_);
  std::erase_if(witnesses_, [](const auto& each) { return each.expired(); });
  witnesses_.push_back(std::move(witness));
}

bool RankWatch::is_lost(int64_t rank) const {
  if (sees_end_of(rank)) return false;
  std::vector<std::weak_ptr<Witness>> witnesses;
  {
    const std::lock_guard lock(witnesses_mutex_);
    witnesses = witnesses_;
  }
  return absl::c_any_of(witnesses, [&](const auto& each) {
    const auto witness = each.lock();
    return witness && witness->has_lost(rank);
  });
}

std::optional<MissingRank> RankWatch::find_origin(std::vector<int64_t> ranks) const {
  std::erase_if(ranks, [&](auto rank) {
    const auto missed = read(missed_by_key(rank));
    return missed && missed->reason == MissingRank::Reason::kTimedOut;
  });
  return find_missing(ranks);
}

std::optional<MissingRank> RankWatch::find_missing(const std::vector<int64_t>& ranks) const {
  for (const auto rank : ranks)
    if (has_ended(rank) || is_lost(rank)) return MissingRank{rank};
  if (const auto first = read(kFirstMissingKey); first && first->reason == MissingRank::Reason::kEnded)
    for (const auto rank : ranks)
      if (rank == first->rank && rank != rank_) return first;
  return std::nullopt;
}

// "" where the store does not answer.
std::string RankWatch::ask_store(std::function<std::string()> question) const {
  if (store_is_gone_) return ""; // each failure costs lines of c10d's
  try {
    return within<std::string>(kStoreLimit, std::move(question)).value_or("");
  } catch (const std::exception&) {
    store_is_gone_ = true;
    return "";
  }
}

std::optional<MissingRank> RankWatch::read(const std::string& key) const {
  const auto question = [store = store_, key] { return store->check({key}) ? store->get_to_str(key) : ""; };
  return MissingRank::decode(ask_store(question));
}

// Returns what was recorded before, or else `found`.
std::optional<MissingRank> RankWatch::record(const MissingRank& found) const {
  const auto question = [store = store_, job_store = job_store_, text = found.encode()] {
    auto first = store->compareSet(kFirstMissingKey, "", text);
    if (first == text) job_store->set(kMissingRankKey, text);
    return first;
  };
  return MissingRank::decode(ask_store(question));
}

void RankWatch::say(const std::string& text) const {
  ask_store([store = store_, key = missed_by_key(rank_), text] {
    store->set(key, text);
    return "";
  });
}

void RankWatch::announce(const MissingRank& missing) const {
  says_ended_ = missing.reason == MissingRank::Reason::kEnded;
  say(missing.encode());
}

void RankWatch::withdraw() const {
  says_ended_ = false;
  say("-"); // names nobody
}

void RankWatch::announce_departure(c10::intrusive_ptr<c10d::Store> departures) const {
  ask_store([departures = std::move(departures), key = departed_key(rank_)] {
    departures->set(kDepartedKey, "");
    departures->set(key, "");
    return "";
  });
}

bool RankWatch::has_left(int64_t rank, const c10::intrusive_ptr<c10d::Store>& departures) const {
  if (!departures || has_ended(rank)) return false;
  return !ask_store([departures, key = departed_key(rank)] { return departures->check({key}) ? "yes" : ""; }).empty();
}

bool RankWatch::any_has_left(const c10::intrusive_ptr<c10d::Store>& departures) const {
  return departures && !ask_store([departures] { return departures->check({kDepartedKey}) ? "yes" : ""; }).empty();
}

// Whom `missing` missed itself, and so on to the first. One that ended while it waited for another is the first.
MissingRank RankWatch::follow(MissingRank missing) const {
  using Reason = MissingRank::Reason;
  for (std::set<int64_t> seen{rank_}; seen.insert(missing.rank).second;) {
    const auto next = read(missed_by_key(missing.rank));
    if (!next) break;
    if (next->reason == Reason::kAwaited && (missing.reason == Reason::kEnded || has_ended(missing.rank))) break;
    missing = {next->rank, next->reason == Reason::kEnded ? Reason::kEnded : Reason::kTimedOut};
  }
  return missing;
}

// One whose process goes on may have closed its connections because it missed another rank, and be about to say so.
std::optional<MissingRank> RankWatch::await_first_missing(int64_t found,
                                                          const c10::intrusive_ptr<c10d::Store>& departures) const {
  const auto limit = std::chrono::steady_clock::now() + kRecordGrace;
  while (!store_is_gone_) {
    const bool has_said_all = has_ended(found) || std::chrono::steady_clock::now() >= limit;
    if (const auto first = read(kFirstMissingKey)) return first;
    const auto origin = follow({found});
    for (const auto rank : {origin.rank, found}) // what `found` missed may have been in another group
      if (!has_ended(origin.rank) && has_left(rank, departures)) return MissingRank{rank, MissingRank::Reason::kLeft};
    if (has_said_all || origin.rank != found) return record(origin);
    std::this_thread::sleep_for(kRecordInterval);
  }
  return std::nullopt;
}

int64_t RankWatch::likely_ended(const std::vector<int64_t>& ranks) const {
  const auto seen = absl::c_find_if(ranks, [&](auto rank) { return has_ended(rank); });
  return seen == ranks.end() ? ranks.front() : *seen;
}

std::string RankWatch::blame(const std::vector<int64_t>& ended, const std::vector<int64_t>& also_lost,
                             const c10::intrusive_ptr<c10d::Store>& departures) const {
  announce_ended(ended);
  const auto first = await_first_missing(likely_ended(ended), departures);
  if (!first) {
    std::set<int64_t> all(ended.begin(), ended.end()), seen;
    all.insert(also_lost.begin(), also_lost.end());
    std::copy_if(all.begin(), all.end(), std::inserter(seen, seen.end()), [&](auto rank) { return has_ended(rank); });
    const auto& named = seen.empty() ? all : seen;
    return describe_ended({named.begin(), named.end()});
  }
  const auto list = list_of_ranks(ended);
  const bool is_own = absl::c_linear_search(ended, first->rank);
  if (first->rank == rank_ || first->reason == MissingRank::Reason::kTimedOut) {
    const auto next = read(missed_by_key(ended[0])).value_or(*first).rank; // ranks may wait in a circle, which has no first
    const bool is_news = !is_own && first->rank != rank_ && first->rank != next;
    return c10::str(list, ", which had waited for ", next == rank_ ? "this rank" : c10::str("rank ", next), " in vain",
                    is_news ? c10::str(" (first missing was rank ", first->rank, ")") : "");
  }
  const auto cause = first->reason == MissingRank::Reason::kLeft ? c10::str("rank ", first->rank, ", which has left the group")
                                                                 : describe_ended({first->rank});
  return c10::str(cause, is_own ? "" : c10::str(" (", list, " followed)"));
}

int64_t RankWatch::announce_first_silent(const std::vector<int64_t>& ranks, MissingRank::Reason reason) const {
  const auto is_silent = [&](auto rank) { return !has_ended(rank) && !read(missed_by_key(rank)); };
  const auto silent = ranks.size() == 1 ? ranks.begin() : absl::c_find_if(ranks, is_silent); // a store that is gone takes seconds
  const auto rank = silent == ranks.end() ? ranks.front() : *silent;
  announce({rank, reason});
  return rank;
}

std::string RankWatch::describe_waiting(const std::vector<int64_t>& ranks) const {
  std::vector<std::string> waiting;
  std::vector<int64_t> silent;
  for (const auto rank : ranks) {
    const auto missed = read(missed_by_key(rank));
    if (!missed) {
      silent.push_back(rank);
      continue;
    }
    const auto origin = follow({rank}).rank;
    const auto cause = origin == rank_ || origin == rank ? missed->rank : origin; // a circle has no first
    if (ranks.size() > 1 || cause != rank_)
      waiting.push_back(c10::str("rank ", rank, " has waited for rank ", cause, " in vain"));
  }
  if (ranks.size() > 1 && !silent.empty()) waiting.push_back(c10::str("nothing is known of ", list_of_ranks(silent)));
  return waiting.empty() ? "" : c10::str(" (", c10::Join(", ", waiting), ")");
}

// Ranks that wait in a row come to their timeouts together, and know more a moment later.
std::string RankWatch::note_timeout(const std::vector<int64_t>& ranks) const {
  constexpr size_t kMostAsked = 8; // of a large group
  const std::vector<int64_t> asked(ranks.begin(),
                                   ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kMostAsked)));
  auto late = announce_late(asked);
  const auto limit = std::chrono::steady_clock::now() + kRecordGrace;
  while (!store_is_gone_ && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(kRecordInterval);
    late = announce_late(asked);
  }
  const auto first = record(follow({late, MissingRank::Reason::kTimedOut}));
  const bool is_news = first && first->rank != rank_ && (asked.size() > 1 || first->rank != asked[0]);
  if (is_news && first->reason == MissingRank::Reason::kEnded)
    return c10::str(" (first missing was ", describe_ended({first->rank}), ")");
  if (is_news && asked.size() == 1) return c10::str(" (rank ", asked[0], " has waited for rank ", first->rank, " in vain)");
  return describe_waiting(asked);
}

} // namespace tessera::internal
