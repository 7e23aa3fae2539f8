// The checker names hand-made races in every run, and reports nothing about right programs.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <future>
#include <string>
#include <vector>

#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing::sim::races_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kSeeds = 100;

c10::Stream side_stream() {
  static const auto stream = new_stream("side");
  return stream;
}

void order(const c10::Stream& first, const c10::Stream& second) {
  c10::Event event(kDeviceType);
  event.record(first);
  event.block(second);
}

torch::Tensor ones() { return torch::ones({64}, torch::TensorOptions(kDevice)); }

std::vector<std::string> names_of_races() {
  std::vector<std::string> names;
  for (const auto& [race, count] : races()) names.push_back(race);
  return names;
}

class Races : public ::testing::Test {
 protected:
  void SetUp() override { enable(); }

  /// The races of `program` in each of 100 seeds, without delays.
  static std::vector<std::vector<std::string>> found_in_all_seeds(const std::function<void()>& program) {
    std::vector<std::vector<std::string>> found;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      configure({.delays = {.seed = seed}});
      reset_races();
      program();
      synchronize();
      found.push_back(names_of_races());
    }
    reset_races();
    return found;
  }
};

/// Made on the side stream, read on the default one.
void produce_and_consume(bool waits) {
  const auto x = ones();
  order(default_stream(), side_stream());
  torch::Tensor made;
  {
    const c10::StreamGuard on(side_stream());
    made = x * 2;
  }
  if (waits) order(side_stream(), default_stream());
  const auto used = made + 1;
  order(default_stream(), side_stream()); // before `made` goes back to the side stream
}

TEST_F(Races, AMissingEventIsFoundInEveryRun) {
  for (const auto& found : found_in_all_seeds([] { produce_and_consume(false); }))
    EXPECT_THAT(found, ElementsAre("aten::add on stream 0 reads what aten::mul on side writes: nothing orders the two"));
  for (const auto& found : found_in_all_seeds([] { produce_and_consume(true); })) EXPECT_THAT(found, IsEmpty());
}

enum class Care { kNone, kRecordStream, kWait };

/// Read on the side stream, freed and allocated again on the default one.
void use_after_free(Care care) {
  torch::Tensor result;
  {
    const auto x = ones() * 3;
    order(default_stream(), side_stream());
    const c10::StreamGuard on(side_stream());
    result = x * 2;
    if (care == Care::kRecordStream) x.record_stream(side_stream());
  }
  if (care == Care::kWait) order(side_stream(), default_stream());
  const auto reused = torch::zeros({64}, torch::TensorOptions(kDevice));
}

TEST_F(Races, AUseAfterAFreeIsFoundInEveryRun) {
  for (const auto& found : found_in_all_seeds([] { use_after_free(Care::kNone); }))
    EXPECT_THAT(found,
                ElementsAre("aten::zero_ on stream 0 writes what aten::mul on side reads, whose memory was freed and handed "
                            "out again: nothing orders the two"));
  for (const auto care : {Care::kRecordStream, Care::kWait})
    for (const auto& found : found_in_all_seeds([=] { use_after_free(care); })) EXPECT_THAT(found, IsEmpty());
}

/// Written in place on one stream and read on another, in either order.
TEST_F(Races, WritesRaceInBothDirections) {
  for (const bool writes_first : {true, false}) {
    const auto found = found_in_all_seeds([=] {
      auto x = ones();
      order(default_stream(), side_stream());
      torch::Tensor read;
      const auto write = [&] { x.add_(1); };
      const auto read_on_the_side = [&] {
        const c10::StreamGuard on(side_stream());
        read = x.neg();
      };
      writes_first ? (write(), read_on_the_side()) : (read_on_the_side(), write());
      order(side_stream(), default_stream());
    });
    for (const auto& each : found) {
      ASSERT_EQ(each.size(), 1);
      EXPECT_THAT(each[0], HasSubstr("aten::add on stream 0"));
      EXPECT_THAT(each[0], HasSubstr("aten::neg on side"));
    }
  }
}

torch::Tensor pinned_ones() { return torch::ones({64}, torch::TensorOptions().pinned_memory(true)); }

/// The host reads what a copy brings to pinned memory, or writes what one takes from there.
void use_pinned_memory(bool to_the_host, bool waits) {
  const auto on_device = ones();
  auto pinned = pinned_ones();
  to_the_host ? pinned.copy_(on_device, /*non_blocking=*/true) : on_device.copy_(pinned, /*non_blocking=*/true);
  if (waits) default_stream().synchronize();
  to_the_host ? static_cast<void>(pinned.sum()) : static_cast<void>(pinned.narrow(0, 3, 2).add_(1));
  synchronize();
}

TEST_F(Races, PinnedMemoryMayBeCopiedTwiceInOrder) {
  const auto program = [] {
    const auto pinned = pinned_ones();
    ones().copy_(pinned, /*non_blocking=*/true);
    const auto made = pinned.to(kDevice, /*non_blocking=*/true);
    synchronize();
  };
  for (const auto& found : found_in_all_seeds(program)) EXPECT_THAT(found, IsEmpty());
}

TEST_F(Races, TheHostsUseOfPinnedMemoryIsSeen) {
  for (const auto& found : found_in_all_seeds([] { use_pinned_memory(true, false); }))
    EXPECT_THAT(found,
                ElementsAre("aten::sum on the host reads what copy to the host on stream 0 writes: nothing orders the two"));
  for (const auto& found : found_in_all_seeds([] { use_pinned_memory(false, false); }))
    EXPECT_THAT(found,
                ElementsAre("aten::add_ on the host writes what copy to the device on stream 0 reads: nothing orders the two"));
  for (const bool to_the_host : {true, false})
    for (const auto& found : found_in_all_seeds([=] { use_pinned_memory(to_the_host, true); })) EXPECT_THAT(found, IsEmpty());
}

TEST_F(Races, ReadsDoNotRace) {
  configure({});
  reset_races();
  const auto x = ones();
  order(default_stream(), side_stream());
  torch::Tensor other;
  {
    const c10::StreamGuard on(side_stream());
    other = x * 2;
  }
  const auto own = x * 3;
  order(side_stream(), default_stream());
  EXPECT_THAT(names_of_races(), IsEmpty());
}

TEST_F(Races, OnlySharedBytesRace) {
  const auto written_on_two_streams = [](const torch::Tensor& first, const torch::Tensor& second) {
    synchronize();
    reset_races();
    first.fill_(1);
    {
      const c10::StreamGuard on(side_stream());
      second.fill_(2);
    }
    synchronize();
    return names_of_races().size();
  };
  const auto matrix = torch::zeros({6, 5}, torch::TensorOptions(kDevice));
  EXPECT_EQ(written_on_two_streams(matrix.select(1, 0), matrix.select(1, 1)), 0);       // columns
  EXPECT_EQ(written_on_two_streams(matrix.narrow(0, 0, 3), matrix.narrow(0, 3, 3)), 0); // halves
  EXPECT_EQ(written_on_two_streams(matrix.narrow(1, 0, 2), matrix.narrow(1, 2, 3)), 0);
  EXPECT_EQ(written_on_two_streams(matrix.narrow(1, 0, 3), matrix.narrow(1, 2, 3)), 1);
  EXPECT_EQ(written_on_two_streams(matrix.select(1, 2), matrix.select(0, 3)), 1);
  EXPECT_EQ(written_on_two_streams(matrix, matrix.select(1, 4)), 1);
  EXPECT_EQ(written_on_two_streams(matrix.narrow(0, 0, 0), matrix), 0);
  reset_races();
}

TEST_F(Races, TheHostOrdersWhatItWaitedFor) {
  configure({});
  for (const bool waits : {true, false}) {
    reset_races();
    auto x = ones();
    order(default_stream(), side_stream());
    torch::Tensor read;
    c10::Event event(kDeviceType);
    {
      const c10::StreamGuard on(side_stream());
      read = x.neg();
      event.record(side_stream());
    }
    if (waits) event.synchronize();
    x.add_(1);
    EXPECT_EQ(names_of_races().empty(), waits);
    synchronize();
  }
  reset_races();
}

/// Holds a stream back until the end of the scope.
class Gate {
 public:
  explicit Gate(const c10::Stream& stream) {
    launch(stream, "gate", {}, {}, [opened = opened_.get_future().share()] { opened.wait(); });
  }
  ~Gate() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST_F(Races, ReadingTooEarlyReadsPoison) {
  configure({});
  ones(); // its block is the next one of its size
  torch::Tensor made = torch::empty({64}, torch::TensorOptions(kDevice));
  {
    const Gate gate(side_stream());
    launch(side_stream(), "fill", {}, {made}, [to = cpu_alias(made)] { to.fill_(1); });
    EXPECT_TRUE(made.cpu().isnan().all().item<bool>());
  }
  synchronize();
  EXPECT_TRUE(made.cpu().eq(1).all().item<bool>());
  reset_races();
}

} // namespace
} // namespace tessera::testing::sim::races_test
