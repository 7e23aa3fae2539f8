#include <gmock/gmock.h>
#include <tessera/checkpoint/boxes/runs.h>
#include <tessera/dtensor/tensor/pieces.h>
#include <torch/torch.h>

namespace tessera::checkpoint::runs_test {
namespace {

using Sizes = std::vector<int64_t>;

// Row-major positions, in the whole tensor, of a box's elements.
Sizes positions(const Sizes& sizes, const internal::Box& box) {
  const auto part = internal::narrow(torch::arange(internal::whole(sizes).numel()).view(sizes), box).contiguous();
  return {part.data_ptr<int64_t>(), part.data_ptr<int64_t>() + part.numel()};
}

TEST(Runs, VisitEveryCommonElementOnceInOrder) {
  const Sizes sizes{3, 4, 5};
  const std::vector<internal::Box> boxes{
      internal::whole(sizes), {{1, 0, 0}, {2, 4, 5}}, {{0, 1, 0}, {3, 2, 5}}, {{0, 0, 2}, {3, 4, 2}}, {{1, 1, 1}, {1, 2, 3}}};
  for (const auto& a : boxes) {
    for (const auto& b : boxes) {
      const auto common = internal::intersect(a, b);
      ASSERT_TRUE(common);
      const auto in_a = positions(sizes, a), in_b = positions(sizes, b);
      Sizes visited;
      internal::for_each_run(*common, a, b, [&](int64_t from, int64_t to, int64_t length) {
        for (int64_t i = 0; i < length; ++i) {
          ASSERT_EQ(in_a.at(from + i), in_b.at(to + i));
          visited.push_back(in_a[from + i]);
        }
      });
      ASSERT_EQ(visited, positions(sizes, *common)) << to_string(a) << " and " << to_string(b);
    }
  }
}

TEST(Runs, AreAsLongAsPossible) {
  int runs = 0;
  internal::for_each_run({{1, 0, 0}, {2, 4, 5}}, internal::whole({3, 4, 5}), {{1, 0, 0}, {2, 4, 5}},
                         [&](int64_t from, int64_t to, int64_t length) {
                           EXPECT_EQ(from, 20);
                           EXPECT_EQ(to, 0);
                           EXPECT_EQ(length, 40);
                           ++runs;
                         });
  internal::for_each_run(internal::whole({}), internal::whole({}), internal::whole({}),
                         [&](int64_t from, int64_t to, int64_t length) {
                           EXPECT_EQ(length, 1);
                           ++runs;
                         });
  EXPECT_EQ(runs, 2);
}

} // namespace
} // namespace tessera::checkpoint::runs_test
