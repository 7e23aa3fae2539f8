// The parts of the shared memory transport, in one process.
#include <tessera/tests/support/matchers.h>

#include <tessera/base/stream_copy.h>
#include <tessera/collectives/backends/shared_memory/engine.h>
#include <tessera/collectives/backends/shared_memory/memory/arena.h>
#include <tessera/collectives/backends/shared_memory/memory/group_memory.h>
#include <tessera/collectives/sums/reduce.h>
#include <tessera/collectives/sums/wide_sum.h>
#include <torch/torch.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::internal::shared_memory::shared_memory_test {
namespace {

TEST(Segment, IsTheSameMemoryWhereItIsOpened) {
  const auto made = Segment::create(10000, 10000), opened = Segment::open(getpid(), made.descriptor(), 10000);
  EXPECT_NE(made.data(), opened.data());
  EXPECT_EQ(opened.data()[9999], 0);
  made.data()[9999] = 7;
  EXPECT_EQ(opened.data()[9999], 7);
}

TEST(Segment, IsSafeFromThoseWhoShareIt) {
  const auto made = Segment::create(10000, 10000);
  EXPECT_EQ(ftruncate(made.descriptor(), 0), -1); // a page that is not there any more would end the process
  EXPECT_EQ(fcntl(made.descriptor(), F_GETFD), FD_CLOEXEC);
  struct stat status = {};
  ASSERT_EQ(fstat(made.descriptor(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, S_IRUSR | S_IWUSR);
  EXPECT_EQ(status.st_nlink, 0U); // no name that could outlive it
}

TEST(Segment, HasItsPagesThoughSignalsComeAllTheTime) {
  struct sigaction quiet = {}, before = {};
  quiet.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGALRM, &quiet, &before), 0);
  const itimerval often{{0, 2000}, {0, 2000}}, never{};
  ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  const auto made = Segment::create(64 << 20, 64 << 20);
  EXPECT_EQ(setitimer(ITIMER_REAL, &never, nullptr), 0);
  EXPECT_EQ(sigaction(SIGALRM, &before, nullptr), 0);
  struct stat status = {};
  ASSERT_EQ(fstat(made.descriptor(), &status), 0);
  EXPECT_EQ(status.st_blocks * 512, 64 << 20);
}

TEST(Segment, OneThatIsNotTheJobsIsAnError) {
  const auto made = Segment::create(10000, 10000);
  EXPECT_THROWS_WITH(Segment::open(getpid(), made.descriptor(), 20000), "is no segment of this job");
  EXPECT_THROWS_WITH(Segment::open(getpid(), 9999, 10000), "cannot open /proc/");
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_THROWS_WITH(Segment::open(getpid(), null, 0), "is no segment of this job");
  close(null);
}

TEST(Segment, BeyondTheLimitOfFilesIsAnErrorAndNoSignal) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROWS_WITH(Segment::create(2 << 20, 0), "a file may have 1048576 bytes here (ulimit -f), needed are 2097152");
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(Arena, BlocksAreFoundAndFreedRangesAreUsedAgain) {
  const auto arena = Arena::create(2);
  auto first = arena->allocate(100), second = arena->allocate(5000), third = arena->allocate(1);
  EXPECT_EQ(arena->find(first.get()), 0);
  EXPECT_EQ(arena->find(second.get()), 4096);
  EXPECT_EQ(arena->find(static_cast<char*>(third.get()) + 1), 4096 + 8192 + 1);
  const int elsewhere = 0;
  EXPECT_EQ(arena->find(&elsewhere), std::nullopt);
  std::memset(second.get(), 1, 5000);
  void* const place = first.get();
  first.clear();
  second.clear(); // joined with the first
  auto larger = arena->allocate(12000);
  EXPECT_EQ(larger.get(), place);
  EXPECT_EQ(static_cast<char*>(larger.get())[4096], 0); // its pages were given back
}

TEST(Arena, OutlivesItsLastOwnerWhileABlockIsInUse) {
  auto arena = Arena::create(1);
  const std::weak_ptr<Arena> watched = arena;
  auto block = arena->allocate(10);
  arena.reset();
  std::memset(block.get(), 3, 10);
  block.clear();
  EXPECT_TRUE(watched.expired());
}

TEST(Bell, WhoRingsAfterAChangeWakesThoseWhoLookedBefore) {
  const auto shape = GroupShape::of(2, false);
  const GroupMemory memory(Segment::create(shape.bytes(), shape.reserved_bytes()), shape);
  auto mine = memory.lane_of_all(0), theirs = memory.lane_of_all(1);
  std::thread other([&] {
    for (uint64_t call = 1; call <= 2000; ++call) {
      theirs.set(Counter::kPublished, call);
      while (!theirs.all_have(Counter::kPublished, call)) std::this_thread::yield();
    }
  });
  for (uint64_t call = 1; call <= 2000; ++call) {
    mine.set(Counter::kPublished, call);
    while (!mine.all_have(Counter::kPublished, call)) {
      const auto entered = memory.bell().enter();
      if (!mine.all_have(Counter::kPublished, call)) EXPECT_TRUE(memory.bell().sleep(entered, std::chrono::seconds(60)));
      memory.bell().leave();
    }
  }
  other.join();
  EXPECT_FALSE(memory.bell().has_listeners());
}

/// A call of two members, both in this process, which read each other's input where it lies.
struct CallOfTwo {
  static constexpr int64_t kNumel = 100'000, kBytes = kNumel * int64_t{sizeof(float)};

  explicit CallOfTwo(Motion::Kind kind) {
    for (int self = 0; self < 2; ++self) {
      lanes.push_back(memory.lane_of_all(self));
      inputs.push_back(arena->allocate(kBytes));
      outputs.emplace_back(kNumel);
      std::fill_n(static_cast<float*>(inputs.back().get()), kNumel, 1.0F);
      Request request;
      auto& motion = request.motion;
      motion.kind = kind;
      motion.input = {static_cast<char*>(inputs.back().get()), kBytes};
      motion.largest_input = kBytes;
      motion.location = arena->find(inputs.back().get()).value();
      auto* const output = reinterpret_cast<char*>(outputs.back().data());
      motion.receive.resize(2);
      motion.receive[1 - self] = {output, kBytes};
      motion.output = kind == Motion::Kind::kReduceScatter ? Part{output, kBytes / 2} : motion.input;
      motion.dtype = at::kFloat;
      operations.push_back(std::make_unique<Operation>(std::move(request), group));
      EXPECT_TRUE(operations.back()->publish(lanes.back(), 0));
    }
  }
  bool advance(int self) { return operations[self]->advance(lanes[self], members); }

  const std::string group = "of group default [0, 1]";
  const GroupShape shape = GroupShape::of(2, false);
  const GroupMemory memory{Segment::create(shape.bytes(), shape.reserved_bytes()), shape};
  const std::shared_ptr<Arena> arena = Arena::create(2);
  const Members members{.ranks = {0, 1},
                        .places = {0, 1},
                        .arenas = {arena->segment().data(), arena->segment().data()},
                        .has_left = [this](int member) { return memory.has_left(member); }};
  std::vector<Lane> lanes;
  std::vector<c10::DataPtr> inputs;
  std::vector<std::vector<float>> outputs;
  std::vector<std::unique_ptr<Operation>> operations;
};

TEST(Operation, WhatWasReadOfAMemberThatHadLeftIsNoResult) {
  for (const auto kind : {Motion::Kind::kCopies, Motion::Kind::kReduceScatter, Motion::Kind::kAllReduce}) {
    for (const bool leaves : {false, true}) {
      SCOPED_TRACE(c10::str(static_cast<int>(kind), " ", leaves));
      CallOfTwo call(kind);
      if (kind == Motion::Kind::kAllReduce) EXPECT_FALSE(call.advance(0)); // its second step is the one that comes too late
      EXPECT_FALSE(call.advance(1)); // it has read all that it needs, and waits for the other one
      if (leaves) {
        call.memory.leave(1);
        call.inputs[1].clear();
      }
      for (int again = 0; again < 2 && leaves; ++again) EXPECT_FALSE(call.advance(0));
      EXPECT_EQ(call.operations[0]->absent(call.lanes[0]), leaves ? std::vector<int>{1} : std::vector<int>{});
      if (!leaves) EXPECT_TRUE(call.advance(0));
    }
  }
}

/// A message of two members, both in this process.
struct MessageOfTwo {
  MessageOfTwo(const GroupMemory& memory, uint64_t call, int64_t bytes)
      : lanes{memory.lane_of_pair(2, 0, 2), memory.lane_of_pair(2, 0, 0)}, sent(bytes), received(bytes) {
    for (int64_t i = 0; i < bytes; ++i) sent[i] = static_cast<char>(i * 7 + static_cast<int64_t>(call));
    for (int self = 0; self < 2; ++self) {
      Request request{.kind = self == 0 ? CollectiveKind::kSend : CollectiveKind::kReceive};
      auto& motion = request.motion;
      motion.kind = Motion::Kind::kCopies;
      motion.largest_input = bytes;
      motion.receive.resize(2);
      (self == 0 ? motion.input : motion.receive[0]) = {self == 0 ? sent.data() : received.data(), bytes};
      operations.push_back(std::make_unique<Operation>(std::move(request), group));
      EXPECT_TRUE(operations.back()->publish(lanes[self], call));
    }
  }
  bool advance(int self) { return operations[self]->advance(lanes[self], members); }

  const std::string group = "of group default [0, 1, 2]";
  const Members members{.ranks = {2, 0}, .places = {2, 0}};
  std::vector<Lane> lanes;
  std::vector<char> sent, received;
  std::vector<std::unique_ptr<Operation>> operations;
};

/// The rank that sends it goes on, and may have no thread that would show the rest.
TEST(Operation, AMessageUpToABoundNeedsNothingMoreOfItsSender) {
  const auto shape = GroupShape::of(3, false);
  const GroupMemory memory(Segment::create(shape.bytes(), shape.reserved_bytes()), shape);
  const auto bound = shape.pair.inline_bytes;
  for (uint64_t call = 0; call < 3 * Lane::kSlots; ++call) {
    const auto bytes = std::vector<int64_t>{1, 4097, bound - 1, bound, bound + 1}[call % 5];
    SCOPED_TRACE(c10::str("call ", call, ": ", bytes, " bytes"));
    MessageOfTwo message(memory, call, bytes);
    EXPECT_EQ(message.operations[0]->is_short(message.lanes[0]), bytes <= bound);
    EXPECT_EQ(message.advance(1), bytes <= bound);
    bool has_ended = bytes <= bound;
    for (int round = 0; round < 8 && !has_ended; ++round) {
      message.advance(0);
      has_ended = message.advance(1);
    }
    EXPECT_TRUE(has_ended);
    EXPECT_TRUE(message.advance(0));
    EXPECT_EQ(message.received, message.sent);
  }
}

TEST(Engine, ALaneWithoutMemoryIsAnErrorOfItsCallAlone) {
  const auto shape = GroupShape::of(2, false);
  auto segment = Segment::create(shape.bytes(), shape.reserved_bytes());
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  ASSERT_EQ(dup2(null, segment.descriptor()), segment.descriptor()); // gives no pages
  close(null);
  EngineOptions options;
  options.group = "of group default [0, 1] on rank 0";
  options.ranks = {0, 1};
  options.timeout = std::chrono::seconds(60);
  const auto engine = Engine::make(GroupMemory(std::move(segment), shape), std::move(options));
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THROWS_WITH(engine->start({0, 1}, {.kind = CollectiveKind::kSend}), "bytes of shared memory");
  engine->close(); // goes over all lanes
}

TEST(StreamCopy, CopiesAnyRange) {
  const auto source = torch::randint(0, 255, {20000}, torch::kByte);
  for (const int64_t from : {0, 1, 63}) {
    for (const int64_t to : {0, 5, 64}) {
      for (const int64_t bytes : {0, 1, 4095, 4096, 4097, 12345}) {
        auto target = torch::zeros({20000}, torch::kByte);
        auto expected = target.clone();
        expected.narrow(0, to, bytes).copy_(source.narrow(0, from, bytes));
        copy(target.data_ptr<uint8_t>() + to, source.data_ptr<uint8_t>() + from, bytes, Writes::kPastCache);
        EXPECT_TENSORS_EQUAL(target, expected);
      }
    }
  }
}

TEST(Reduce, WideSumsAreThoseOfOneElementAfterAnother) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t inputs : {2, 3, 4, 7}) {
      for (const int64_t numel : {1, 7, 8, 17, 2048, 5003}) {
        auto all = torch::randn({inputs, numel}) * 100;
        all.view(-1)[numel / 2] = NAN;
        all.view(-1)[numel / 3] = INFINITY;
        all = all.to(dtype);
        auto expected = all[0].to(at::kFloat);
        for (int64_t i = 1; i < inputs; ++i) expected = expected + all[i].to(at::kFloat);
        expected = (expected / static_cast<float>(inputs)).to(dtype);
        std::vector<const void*> pointers;
        for (int64_t i = 0; i < inputs; ++i) pointers.push_back(all[i].data_ptr());
        for (const auto writes : {Writes::kThroughCache, Writes::kPastCache}) {
          auto output = torch::empty({numel}, dtype);
          reduce(output.data_ptr(), pointers, numel, dtype, ReduceOp::kAvg, writes);
          EXPECT_TRUE(torch::allclose(output, expected, 0, 0, /*equal_nan=*/true)) << dtype << " " << inputs << " " << numel;
        }
      }
    }
  }
}

} // namespace
} // namespace tessera::internal::shared_memory::shared_memory_test
