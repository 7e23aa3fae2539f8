#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/checkpointer.h>
#include <torch/torch.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <iterator>
#include <thread>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::checkpointer_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::SharedFolder;
using testing::TemporaryFolder;
using testing::world_rank;

std::string own_name() { return c10::str("rank", world_rank()); }

TEST(Checkpointer, SavesWhatTheTensorsHeldWhenItWasCalled) {
  const SharedFolder folder;
  Checkpointer checkpointer;
  StateDict state;
  state.add(own_name(), torch::zeros({300, 1001}));
  state.set("step", 0);
  for (int64_t step = 0; step < 4; ++step) {
    state.tensor(own_name()).fill_(static_cast<double>(step));
    state.set("step", step);
    if (step == 2) state.add(own_name() + ".more", torch::ones({3})); // another plan
    checkpointer.save(state, folder.path() / std::to_string(step));
    state.tensor(own_name()).fill_(-1);
  }
  checkpointer.wait();
  checkpointer.wait();
  for (int64_t step = 0; step < 4; ++step) {
    StateDict loaded;
    loaded.add(own_name(), torch::zeros({300, 1001}));
    if (step >= 2) loaded.add(own_name() + ".more", torch::zeros({3}));
    loaded.set("step", -1);
    load(loaded, folder.path() / std::to_string(step));
    EXPECT_TENSORS_EQUAL(loaded.tensor(own_name()), torch::full({300, 1001}, static_cast<double>(step)));
    EXPECT_EQ(loaded.value<int64_t>("step"), step);
  }
}

TEST(Checkpointer, AnErrorComesWithTheNextCallOnEveryRankAndTheOneAfterWorks) {
  const SharedFolder folder;
  Checkpointer checkpointer;
  const int last = process_context().world_size() - 1;
  StateDict bad, good;
  bad.add(own_name(), world_rank() == last ? torch::empty({2}, at::kMeta) : torch::ones({2}));
  good.add(own_name(), torch::ones({2}));
  checkpointer.save(bad, folder.path() / "bad");
  EXPECT_THAT(error_of([&] { checkpointer.save(good, folder.path() / "good"); }),
              HasSubstr(c10::str("rank ", last, ": checkpoint: tensor")));
  checkpointer.save(good, folder.path() / "good");
  checkpointer.wait();
  checkpointer.save(good, folder.path() / "good");
  EXPECT_THAT(error_of([&] { checkpointer.wait(); }), HasSubstr("good exists already"));
  EXPECT_NO_THROW(checkpointer.wait());
  EXPECT_TRUE(verify(folder.path() / "good").empty());
}

TEST(Checkpointer, ItsEndWaitsForTheSave) {
  const SharedFolder folder;
  StateDict state;
  state.add(own_name(), torch::ones({1'000'000}));
  {
    Checkpointer checkpointer;
    checkpointer.save(state, folder.path() / "c");
  }
  EXPECT_TRUE(verify(folder.path() / "c").empty());
}

TEST(Checkpointer, SeveralSaveBesideEachOther) {
  const SharedFolder folder;
  StateDict state;
  state.add(own_name(), torch::ones({1'000'000}));
  for (int round = 0; round < 2; ++round) { // the second one takes the groups of the first
    Checkpointer model, average;
    for (int step = 0; step < 3; ++step) {
      model.save(state, folder.path() / c10::str("model-", round, "-", step));
      average.save(state, folder.path() / c10::str("average-", round, "-", step));
    }
    model.wait();
    average.wait();
  }
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(verify(folder.path() / c10::str("model-1-", step)).empty());
    EXPECT_TRUE(verify(folder.path() / c10::str("average-1-", step)).empty());
  }
}

TEST(Checkpointer, LinksAreReplacedBesideEachOther) {
  const TemporaryFolder folder;
  const auto replace = [&](const std::string& target) {
    for (int i = 0; i < 200; ++i) internal::replace_link(folder.path() / "latest", target);
  };
  std::filesystem::create_symlink("killed", folder.path() / ".latest.new");
  auto other = std::async(std::launch::async, replace, "a");
  replace("b");
  other.get();
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path() / "latest"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Checkpointer, ALinkIsReplacedInTurnAlsoWhereSignalsCome) {
  const TemporaryFolder folder;
  const auto link = folder.path() / "latest";
  const int other = ::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) {}; // system calls are not restarted
  ::sigaction(SIGUSR2, &action, &before);
  std::thread waiting([&] { internal::replace_link(link, "a"); });
  const auto is_replaced = [&] { return std::filesystem::exists(std::filesystem::symlink_status(link)); };
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
       !is_replaced() && std::chrono::steady_clock::now() < end; std::this_thread::yield())
    ::pthread_kill(waiting.native_handle(), SIGUSR2);
  EXPECT_FALSE(is_replaced());
  ::close(other);
  waiting.join();
  ::sigaction(SIGUSR2, &before, nullptr);
  EXPECT_EQ(std::filesystem::read_symlink(link), "a");
}

TEST(Checkpointer, ARelativePathIsThatOfTheCall) {
  const SharedFolder folder;
  const auto start = std::filesystem::current_path(), a = folder.path() / "a", b = folder.path() / "b";
  const auto go_back = c10::make_scope_exit([&] { std::filesystem::current_path(start); });
  if (world_rank() == 0) {
    std::filesystem::create_directory(a);
    std::filesystem::create_directory(b);
  }
  SharedFolder::barrier();
  StateDict state;
  state.add(own_name(), torch::ones({2}));
  {
    Checkpointer checkpointer;
    for (int i = 0; i < 10; ++i) { // the thread comes to its path at any time
      std::filesystem::current_path(a);
      checkpointer.save(state, std::to_string(i));
      std::filesystem::current_path(b);
      EXPECT_EQ(error_of([&] { checkpointer.wait(); }), "no error");
    }
  }
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(verify(a / std::to_string(i)).empty());
  EXPECT_TRUE(std::filesystem::is_empty(b));
}

TEST(Checkpointer, RunsBesideCollectivesOfTheTraining) {
  const SharedFolder folder;
  Checkpointer checkpointer;
  StateDict state;
  state.add(own_name(), torch::ones({2'000'000}));
  auto& context = process_context();
  std::vector<int64_t> world(context.world_size());
  std::iota(world.begin(), world.end(), 0);
  const auto group = context.communicator(world, at::kCPU);
  checkpointer.save(state, folder.path() / "c");
  for (int i = 0; i < 200; ++i) {
    const auto sum = torch::ones({100});
    group->all_reduce(sum, ReduceOp::kSum, "training").wait();
    ASSERT_EQ(sum[99].item<int64_t>(), context.world_size());
  }
  checkpointer.wait();
  EXPECT_TRUE(verify(folder.path() / "c").empty());
}

} // namespace
} // namespace tessera::checkpoint::checkpointer_test
