#include <tessera/collectives/ranks/group_store.h>

#include <tessera/base/time_limit.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <thread>

namespace tessera::internal {

namespace {

using std::chrono::milliseconds, std::chrono::steady_clock;

constexpr const char* kFailedKey = "failed";
std::string arrival_key(int64_t rank) { return c10::str("arrived/", rank); }
constexpr milliseconds kFirstPause(1);
constexpr std::chrono::seconds kGrace(2); // for the store's answers

// As many ranks wait as there are keys, and one store answers them all.
milliseconds pause_of(size_t keys) { return std::clamp(milliseconds(keys / 3), milliseconds(100), milliseconds(400)); }

// Returns why the wait was given up, or "" when all keys have come.
std::string poll_for_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                          const std::function<std::string()>& give_up) {
  const auto deadline = steady_clock::now() + timeout;
  const auto longest_pause = pause_of(keys.size());
  auto pause = kFirstPause;
  for (size_t next = 0, step = 1; next < keys.size();) {
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(next);
    step = std::min(step, keys.size() - next);
    if (store.check({begin, begin + static_cast<std::ptrdiff_t>(step)})) {
      next += step;
      step *= 2;
      continue;
    }
    if (step > 1) { // all that have come before the first that is missing cost a few requests; then that one is asked for
      step /= 2;
      continue;
    }
    auto reason = pause == longest_pause ? give_up() : "";
    if (steady_clock::now() > deadline) reason = c10::str("timed out after ", timeout.count(), " ms");
    if (!reason.empty()) return store.check(keys) ? "" : reason; // they may have come just before
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest_pause);
  }
  return "";
}

} // namespace

std::vector<int64_t> absent_ranks(c10d::Store& store, const std::vector<int64_t>& ranks,
                                  const std::function<std::string(int64_t)>& key_of) {
  std::vector<std::string> keys;
  for (const auto rank : ranks) keys.push_back(key_of(rank));
  if (keys.empty() || store.check(keys)) return {};
  if (keys.size() == 1) return ranks;
  const auto middle = ranks.begin() + static_cast<std::ptrdiff_t>(ranks.size() / 2);
  auto absent = absent_ranks(store, {ranks.begin(), middle}, key_of);
  const auto others = absent_ranks(store, {middle, ranks.end()}, key_of);
  absent.insert(absent.end(), others.begin(), others.end());
  return absent;
}

void wait_for_keys(c10::intrusive_ptr<c10d::Store> store, std::vector<std::string> keys, milliseconds timeout,
                   std::function<std::string()> give_up) {
  const auto reason = within<std::string>(
      timeout + kGrace, [store = std::move(store), keys = std::move(keys), timeout, give_up = std::move(give_up)] {
        return poll_for_keys(*store, keys, timeout, give_up);
      });
  if (!reason) C10_THROW_ERROR(DistStoreError, c10::str("the store did not answer for ", timeout.count(), " ms"));
  if (!reason->empty()) C10_THROW_ERROR(DistStoreError, *reason);
}

GroupStore::GroupStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks,
                       std::shared_ptr<RankWatch> watch)
    : PrefixStore(std::move(prefix), std::move(store)), ranks_(std::move(ranks)), watch_(std::move(watch)) {}

std::vector<uint8_t> GroupStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> GroupStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void GroupStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto self = c10::intrusive_ptr<GroupStore>::reclaim_copy(this);
  wait_for_keys(store_, joinKeys(keys), timeout, [self] { return self->reason_to_give_up(); });
}

void GroupStore::arrive(int64_t rank, milliseconds timeout) {
  TORCH_CHECK(own_ == rank || !check({arrival_key(rank)}),
              "an earlier attempt to connect these ranks for this purpose has failed",
              failure().empty() ? "" : " (" + failure() + ")", "; another one needs another purpose");
  set(arrival_key(rank), "");
  own_ = rank;
  announcement_interval_ = timeout / 8;
  announces_wait_at_ = RankWatch::announces_wait_at(steady_clock::now() + timeout, timeout);
}

std::vector<int64_t> GroupStore::absent() { return absent_ranks(*this, ranks_, arrival_key); }

void GroupStore::leave() {
  if (is_announced_.exchange(false)) watch_->withdraw();
}

// Where all have arrived, one of them does not go on, and does not say that it waits for another. The others do, by and by.
void GroupStore::announce_long_wait() {
  constexpr size_t kMostAsked = 8; // of a large group
  if (steady_clock::now() < announces_wait_at_.load()) return;
  announces_wait_at_ = steady_clock::now() + announcement_interval_;
  auto late = absent();
  if (late.empty()) late = ranks_;
  std::erase(late, own_);
  late.resize(std::min(late.size(), kMostAsked));
  if (late.empty()) return;
  is_announced_ = true;
  watch_->announce_wait(late);
}

void GroupStore::fail(int64_t rank, const std::string& why) {
  compareSet(kFailedKey, "", c10::str("rank ", rank, " failed: ", why));
}

std::string GroupStore::failure() {
  const auto failed = joinKey(kFailedKey);
  return store_->check({failed}) ? store_->get_to_str(failed) : "";
}

std::string GroupStore::reason_to_give_up() {
  if (auto* const outer = dynamic_cast<GroupStore*>(store_.get()))
    if (auto reason = outer->reason_to_give_up(); !reason.empty()) return reason;
  announce_long_wait();
  const auto missing = watch_->find_missing(ranks_);
  auto said = failure(); // asked for later than who has ended: one that failed has said so before it ended
  if (!missing || said.starts_with(c10::str("rank ", missing->rank, " failed: "))) return said;
  return c10::str("rank ", missing->rank, " has exited or failed");
}

} // namespace tessera::internal
