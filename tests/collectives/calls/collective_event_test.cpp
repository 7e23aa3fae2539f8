#include <tessera/tests/support/matchers.h>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tessera::collective_event_test {
namespace {

struct Event {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;
  bool is_async, is_over = false;
};

/// The events of collectives that begin on this thread while it lives.
class Profile {
 public:
  Profile() {
    events().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begin, end).needsInputs(true).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Profile() { at::removeCallback(handle_); }
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  static std::vector<Event>& events() {
    static std::vector<Event> events; // a callback is a plain function
    return events;
  }

 private:
  struct Place : at::ObserverContext {
    explicit Place(size_t at) : index(at) {}
    size_t index;
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    Event event{.name = function.name(), .sizes = {}, .is_async = function.isAsync()};
    if (!event.name.starts_with("tessera:")) return nullptr; // gloo has its own, of messages
    for (const auto& input : function.inputs()) event.sizes.push_back(input.toTensor().sizes().vec());
    events().push_back(std::move(event));
    return std::make_unique<Place>(events().size() - 1);
  }
  static void end(const at::RecordFunction&, at::ObserverContext* place) {
    if (place != nullptr) events()[static_cast<Place*>(place)->index].is_over = true;
  }

  at::CallbackHandle handle_;
};

CommunicatorPtr world() {
  auto& context = process_context();
  std::vector<int64_t> ranks(context.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return context.communicator(ranks, at::kCPU);
}

struct Case {
  const char* name;
  std::vector<int64_t> sizes; ///< of what it sends, or receives where it sends nothing
  std::function<Work()> start;
};

std::vector<Case> cases(Communicator& group, int64_t numel) {
  const int64_t n = group.size();
  const auto part = torch::ones({numel}), whole = torch::ones({n * numel}), grid = torch::ones({2, numel});
  return {{"all_gather", {numel}, [=, &group] { return group.all_gather_into(whole, part, "gathered"); }},
          {"reduce_scatter", {n * numel}, [=, &group] { return group.reduce_scatter(part, whole, ReduceOp::kSum, "scattered"); }},
          {"all_reduce", {2, numel}, [=, &group] { return group.all_reduce(grid, ReduceOp::kSum, "reduced"); }},
          {"all_to_all", {n * numel}, [=, &group] { return group.all_to_all(whole.clone(), whole, {}, {}, "exchanged"); }},
          {"broadcast", {2, numel}, [=, &group] { return group.broadcast(grid, 0, "sent to all"); }}};
}

TEST(CollectiveEvent, EachCallHasOneFromItsStartToItsWait) {
  const auto group = world();
  for (const int64_t numel : {0, 1, 7, 300001}) {
    for (const auto& one : cases(*group, numel)) {
      SCOPED_TRACE(c10::str(one.name, " of ", numel));
      const Profile profile;
      auto work = one.start();
      if (group->size() == 1) { // nothing is sent
        EXPECT_TRUE(Profile::events().empty());
        continue;
      }
      ASSERT_EQ(Profile::events().size(), 1U);
      const auto& event = Profile::events()[0];
      EXPECT_EQ(event.name, c10::str("tessera:", one.name));
      EXPECT_EQ(event.sizes, (std::vector<std::vector<int64_t>>{one.sizes}));
      EXPECT_TRUE(event.is_async);
      EXPECT_FALSE(event.is_over);
      work.wait();
      EXPECT_TRUE(event.is_over);
    }
  }
}

TEST(CollectiveEvent, MessagesAndBarriersHaveThem) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const Profile profile;
  const auto tensor = torch::ones({3});
  if (group->rank() == 0) group->send(tensor, 1, "message").wait();
  if (group->rank() == 1) group->receive(tensor, 0, "message").wait();
  group->barrier("barrier");
  std::vector<std::string> names;
  for (const auto& event : Profile::events()) {
    EXPECT_TRUE(event.is_over);
    names.push_back(event.name);
  }
  const std::vector<std::string> barrier{"tessera:barrier"}, sent{"tessera:send", barrier[0]},
      received{"tessera:receive", barrier[0]};
  EXPECT_EQ(names, group->rank() == 0 ? sent : group->rank() == 1 ? received : barrier);
}

TEST(CollectiveEvent, EndsWhereverTheEndIsSeen) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto tensor = torch::ones({1000});
  const auto start = [&] { return group->all_reduce(tensor, ReduceOp::kMax, "reduced"); };
  const Profile profile;
  const auto& events = Profile::events();
  auto polled = start();
  while (!polled.is_completed()) std::this_thread::yield();
  EXPECT_TRUE(events.at(0).is_over);
  auto awaited = start();
  std::thread([&] { awaited.wait(); }).join();
  EXPECT_TRUE(events.at(1).is_over);
  start(); // dropped
  EXPECT_TRUE(events.at(2).is_over);
  auto together = group->coalesced([&] {
    start();
    start();
  });
  EXPECT_FALSE(events.at(3).is_over || events.at(4).is_over);
  together.wait();
  EXPECT_TRUE(events.at(3).is_over && events.at(4).is_over);
}

TEST(CollectiveEvent, OfACallThatIsRefusedOrFailsEnds) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto other = process_context().communicator(group->ranks(), at::kCPU, "fails");
  const Profile profile;
  EXPECT_THROW(group->broadcast(torch::ones({1}), group->size(), "to no rank"), c10::Error);
  EXPECT_TRUE(Profile::events().empty());
  auto work = other->all_reduce(torch::ones({1 + group->rank()}), ReduceOp::kSum, "of different sizes");
  EXPECT_FALSE(Profile::events().at(0).is_over);
  EXPECT_THROW(work.wait(), c10::Error);
  EXPECT_TRUE(Profile::events().at(0).is_over);
}

namespace profiler = torch::autograd::profiler;

void begin_profile() {
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/true);
  const std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
}

std::vector<profiler::KinetoEvent> end_profile() {
  const auto result = profiler::disableProfiler();
  std::vector<profiler::KinetoEvent> found;
  for (const auto& event : result->events())
    if (event.name() == "tessera:all_reduce") found.push_back(event);
  return found;
}

TEST(CollectiveEvent, LibTorchsProfilerHasThem) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  begin_profile();
  group->all_reduce(torch::ones({2, 3}, torch::kBFloat16), ReduceOp::kSum, "reduced").wait();
  const auto found = end_profile();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_GT(found[0].durationNs(), 0U);
  EXPECT_EQ(found[0].shapes().vec(), (std::vector<std::vector<int64_t>>{{2, 3}}));
  EXPECT_EQ(found[0].dtypes().vec(), std::vector<std::string>{"c10::BFloat16"});
}

/// Whether ranks send by c10d's gloo, whose messages keep a profile that has ended.
bool sends_over_gloo() {
  const auto* transport = std::getenv("TESSERA_TRANSPORT");
  return std::getenv("TESSERA_TEST_HOSTS") != nullptr || (transport != nullptr && std::string_view(transport) == "gloo");
}

TEST(CollectiveEvent, OutlivesLibTorchsProfile) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  if (sends_over_gloo()) GTEST_SKIP() << "c10d's own events are written into a profile after its end (docs/limits.md)";
  const auto start = [&] { return group->all_reduce(torch::ones({2, 3}), ReduceOp::kSum, "reduced"); };
  const std::vector<std::function<void(Work)>> ends{[](Work work) { work.wait(); }, [](const Work&) {},
                                                    [](Work work) { std::thread([&] { work.wait(); }).join(); }};
  for (const auto& end : ends) {
    for (const bool in_another_profile : {false, true}) {
      begin_profile();
      auto work = start();
      const auto state = std::weak_ptr(c10::ThreadLocalDebugInfo::current());
      end_profile();
      EXPECT_TRUE(state.expired()); // its events have gone
      if (in_another_profile) begin_profile();
      const auto current = c10::ThreadLocalDebugInfo::current();
      end(std::move(work));
      EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), current);
      if (!in_another_profile) continue;
      start().wait();
      const auto found = end_profile();
      ASSERT_EQ(found.size(), 1U);
      EXPECT_GT(found[0].durationNs(), 0U);
    }
  }
}

int observed = 0;

TEST(CollectiveEvent, ACallLooksForObserversOnce) {
  const auto group = world();
  if (group->size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto count = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    observed += function.name() == std::string("tessera:barrier");
    return nullptr;
  };
  constexpr int kCalls = 400;
  observed = 0;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(count).samplingProb(0.5).scopes({at::RecordScope::USER_SCOPE}));
  for (int call = 0; call < kCalls; ++call) group->barrier("barrier");
  at::removeCallback(handle);
  EXPECT_NEAR(observed, kCalls / 2.0, kCalls / 8.0); // five standard deviations; of two looks, a quarter would be left
}

} // namespace
} // namespace tessera::collective_event_test
