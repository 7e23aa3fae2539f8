#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <tessera/collectives/ranks/rendezvous.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <future>
#include <numeric>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::group_store_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Counts the requests that each rank of a large job makes of the one store.
class CountingStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    ++requests;
    keys_asked_for += keys.size();
    return HashStore::check(keys);
  }
  std::atomic<size_t> requests{0}, keys_asked_for{0};
};

constexpr int kRanks = 4000;

std::string key_of(int64_t rank) { return "rank/" + std::to_string(rank); }

struct Job {
  Job() : ranks(kRanks) {
    std::iota(ranks.begin(), ranks.end(), 0);
    for (const auto rank : ranks) keys.push_back(key_of(rank));
  }
  void set_all_but(int64_t absent) {
    for (const auto rank : ranks)
      if (rank != absent) store->set(key_of(rank), std::vector<uint8_t>{});
  }

  c10::intrusive_ptr<CountingStore> store = c10::make_intrusive<CountingStore>();
  std::vector<int64_t> ranks;
  std::vector<std::string> keys;
};

TEST(GroupStore, KeysThatAreThereCostAFewRequests) {
  Job job;
  job.set_all_but(-1);
  internal::wait_for_keys(job.store, job.keys, std::chrono::seconds(20), [] { return ""; });
  EXPECT_LE(job.store->requests, 13U); // 1 + 2 + 4 + … keys
  EXPECT_EQ(job.store->keys_asked_for, job.keys.size());
  job.store->requests = 0;
  EXPECT_THAT(internal::absent_ranks(*job.store, job.ranks, key_of), IsEmpty());
  EXPECT_EQ(job.store->requests, 1U);
}

TEST(GroupStore, OneThatDoesNotComeIsFoundInAFewRequests) {
  for (const int64_t absent : {0, 1, 1234, kRanks - 1}) {
    Job job;
    job.set_all_but(absent);
    EXPECT_THAT(internal::absent_ranks(*job.store, job.ranks, key_of), ElementsAre(absent));
    EXPECT_LE(job.store->requests, 26U);
  }
}

TEST(GroupStore, AWaitAsksForAKeyAtATimeAndLessOftenThanTenTimesASecond) {
  Job job;
  job.set_all_but(kRanks / 2);
  constexpr std::chrono::milliseconds kTimeout(2000);
  int asked = 0;
  const auto count = [&] {
    ++asked;
    return std::string();
  };
  EXPECT_THROWS_WITH(internal::wait_for_keys(job.store, job.keys, kTimeout, count), "timed out after 2000 ms");
  EXPECT_LE(asked, 6);
  EXPECT_LE(job.store->requests, 50U);
  EXPECT_LE(job.store->keys_asked_for, 4U * kRanks); // among them all of them once more, at the end
}

TEST(GroupStore, AReasonToGiveUpIsSeenAtOnceInALargeJobToo) {
  Job job;
  constexpr auto* kReason = "rank 7 has exited or failed";
  std::atomic<int> asked = 0;
  EXPECT_THROWS_WITH(internal::wait_for_keys(job.store, job.keys, std::chrono::hours(1),
                                             [&] {
                                               ++asked;
                                               return std::string(kReason);
                                             }),
                     kReason);
  EXPECT_EQ(asked, 1);
  EXPECT_LE(job.store->requests, 20U); // with a pause of at most 400 ms after each
}

TEST(GroupStore, AMeetingThatHasFailedIsNotHeldAgain) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const std::vector<std::string> processes(2);
  const auto watch = std::make_shared<internal::RankWatch>(0, processes, store, store);
  const auto group = [&](const char* name) {
    return c10::make_intrusive<internal::GroupStore>(name, store, std::vector<int64_t>{0, 1}, watch);
  };
  group("a")->arrive(0, std::chrono::minutes(1));
  group("a")->arrive(1, std::chrono::minutes(1));
  EXPECT_THROWS_WITH(group("a")->arrive(0, std::chrono::minutes(1)),
                     "an earlier attempt to connect these ranks for this purpose");
  group("a")->fail(1, "out of luck");
  EXPECT_THROWS_WITH(group("a")->arrive(0, std::chrono::minutes(1)),
                     "has failed (rank 1 failed: out of luck); another one needs");
  const auto other = group("b");
  other->arrive(0, std::chrono::minutes(1));
  other->arrive(0, std::chrono::minutes(1)); // a group that is made through another
}

internal::Rendezvous meeting_of_two(const c10::intrusive_ptr<c10d::Store>& store, int rank, const ProcessGroupOptions& options) {
  return {.store = store, .ranks = {4, 7}, .rank = rank, .options = options, .call = "this call"};
}

TEST(Rendezvous, AnotherProcessIsNotTheSameRank) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("process/1", "that of another job");
  EXPECT_THROWS_WITH(internal::meet(meeting_of_two(store, 1, {})),
                     "this call: another process (that of another job) is rank 7 of this job already");
  EXPECT_EQ(store->get_to_str("process/1"), "that of another job");
}

TEST(Rendezvous, ARankThatEndedBeforeTheOthersCameMayBeStartedAgain) {
  const auto own = internal::RankWatch::own_process();
  if (own[0] == '?') GTEST_SKIP() << "processes of this host cannot be told from those of another";
  const pid_t ended = fork();
  if (ended == 0) _exit(0);
  ASSERT_EQ(waitpid(ended, nullptr, 0), ended);
  const auto scope = own.substr(0, own.find_last_not_of("0123456789") + 1);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  for (const pid_t holder : {ended, getppid()}) {
    store->set("process/1", c10::str(scope, holder));
    EXPECT_THROWS_WITH(internal::meet(meeting_of_two(store, 1, {.timeout = std::chrono::milliseconds(10)})),
                       holder == ended ? "of 2 ranks these did not come: 4" : "is rank 7 of this job already");
  }
}

TEST(Rendezvous, AProcessMayComeAgainAfterATimeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int time = 0; time < 2; ++time)
    EXPECT_THROWS_WITH(internal::meet(meeting_of_two(store, 0, {.timeout = std::chrono::milliseconds(10)})),
                       "of 2 ranks these did not come: 7");
}

TEST(Rendezvous, OptionsThatDifferAreAnErrorOnAllRanks) {
  const std::vector<std::pair<ProcessGroupOptions, std::string>> others{
      {{.transport = Transport::kGloo},
       "the transport (TESSERA_TRANSPORT, ProcessGroupOptions) is automatic on rank 4 and gloo on"},
      {{.check_collectives = false},
       "check_collectives (TESSERA_CHECK_COLLECTIVES, ProcessGroupOptions) is 1 on rank 4 and 0 on"}};
  for (const auto& [options, text] : others) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    auto other = std::async(std::launch::async, [meeting = meeting_of_two(store, 1, options)] { internal::meet(meeting); });
    EXPECT_THROWS_WITH(internal::meet(meeting_of_two(store, 0, {})), "this call: " + text + " rank 7");
    EXPECT_THROWS_WITH(other.get(), "this call: " + text + " rank 7");
  }
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& [key, value] : {std::pair("options/1", "automatic 1 1"), {"joined/1", "host"}, {"process/1", "process"}})
    store->set(key, std::string(value));
  EXPECT_THROWS_WITH(internal::meet(meeting_of_two(store, 0, {})),
                     "TESSERA_CHECK_COLLECTIVES (which alone counts over NCCL) is unset-or-0 on rank 4 and 1 on rank 7");
}

} // namespace
} // namespace tessera::testing::group_store_test
