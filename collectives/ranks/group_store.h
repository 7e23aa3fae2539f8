#pragma once

#include <tessera/collectives/ranks/rank_watch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::internal {

/// The store's part in which the ranks of a group meet. A wait for keys ends with an error as soon as one of the ranks has ended,
/// or has failed there: a key that is missing then does not come, because each rank needs all the others to finish the meeting.
class GroupStore final : public c10d::PrefixStore {
 public:
  GroupStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks,
             std::shared_ptr<RankWatch> watch);

  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  /// Says that `rank`, this one, has come to the meeting. When a good part of `timeout` is over, a wait tells the watch for whom.
  /// An error where it has come before, with another GroupStore: that meeting has failed, and its keys are still there.
  void arrive(int64_t rank, std::chrono::milliseconds timeout);
  /// The ranks that have not come. Asks the store.
  std::vector<int64_t> absent();
  /// The meeting has ended: takes back what the watch was told.
  void leave();
  /// Tells the others that `rank` does not finish the meeting. The first to say so is heard, here and in parts of this part.
  void fail(int64_t rank, const std::string& why);
  /// Why the meeting cannot end well, or "". Asks the store.
  std::string reason_to_give_up();

 private:
  void announce_long_wait();
  std::string failure(); ///< what the first call of `fail` said, or ""

  std::vector<int64_t> ranks_;
  std::shared_ptr<RankWatch> watch_;
  int64_t own_ = -1;
  std::chrono::milliseconds announcement_interval_{0};
  std::atomic<std::chrono::steady_clock::time_point> announces_wait_at_{std::chrono::steady_clock::time_point::max()};
  std::atomic<bool> is_announced_{false};
};

/// The ranks among `ranks` whose key is not in the store: a few requests where nearly all are there.
std::vector<int64_t> absent_ranks(c10d::Store& store, const std::vector<int64_t>& ranks,
                                  const std::function<std::string(int64_t)>& key_of);

/// `store->wait(keys, timeout)` that asks `give_up`, ten times a second (for a thousand keys: three times), for a reason to end
/// the wait with an error. (c10d's own wait knows nothing of ranks that have ended, and one in slices writes a warning for each.)
/// Both functions own what they use: a store that does not answer leaves a thread behind.
void wait_for_keys(c10::intrusive_ptr<c10d::Store> store, std::vector<std::string> keys, std::chrono::milliseconds timeout,
                   std::function<std::string()> give_up);

} // namespace tessera::internal
