// Packed projections: a dim of several chunks, each of which is split over the ranks, as q, k and v beside one another are.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>

#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>

#include <array>
#include <vector>

namespace tessera::testing::packed_test {
namespace {

using torch::Tensor;

Tensor values(at::IntArrayRef sizes) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return torch::arange(count, torch::kDouble).view(sizes);
}

Tensor whole(const Tensor& tensor) { return DTensor(tensor.detach()).full_tensor(); }

Placements placements_of(const Tensor& tensor) { return DTensor(tensor).placements(); }

/// `call` on `x` under `placement` gives what it gives on the plain tensor, forward and backward, and moves nothing. The
/// placements of the results.
template <typename Call>
std::vector<Placements> run(const Tensor& x, const Placement& placement, const Call& call) {
  const auto plain = x.clone().requires_grad_();
  const auto distributed = distribute_tensor(x, line_mesh(), {placement}).requires_grad_();
  const std::vector<Tensor> expected = call(plain);
  std::vector<Tensor> actual, weights, of_parts;
  std::vector<Placements> placements;
  {
    const LogRedistributions log;
    actual = call(distributed);
    EXPECT_EQ(log.to_string(), "");
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    placements.push_back(placements_of(actual[i]));
    weights.push_back(values(expected[i].sizes()).cos());
    of_parts.push_back(distribute_tensor(weights[i], line_mesh(), placements[i]));
    EXPECT_TENSORS_EQUAL(whole(actual[i]), expected[i].detach());
  }
  const LogRedistributions log;
  const auto gradient = torch::autograd::grad(actual, {distributed}, of_parts)[0];
  EXPECT_EQ(log.to_string(), "");
  EXPECT_EQ(placements_of(gradient), placements_of(distributed));
  EXPECT_TENSORS_EQUAL(whole(gradient), torch::autograd::grad(expected, {plain}, weights)[0]);
  return placements;
}

TEST(Packed, ChunksAreCutWhereTheyLie) {
  const auto n = world_size();
  const auto x = values({2, 3 * 2 * n});
  const auto chunks = run(x, StridedShard{1, 3}, [](const Tensor& y) { return y.chunk(3, 1); });
  EXPECT_EQ(chunks, std::vector<Placements>(3, Placements{Shard{1}}));
  const auto slices = run(x, StridedShard{1, 3}, [n](const Tensor& y) {
    return std::vector<Tensor>{y.slice(1, 0, 2 * n), y.slice(1, 2 * n)};
  });
  EXPECT_EQ(slices, (std::vector<Placements>{{Shard{1}}, {StridedShard{1, 2}}}));
  run(x.t().contiguous(), StridedShard{0, 3}, [n](const Tensor& y) { return std::vector<Tensor>{y.slice(0, 2 * n, 4 * n)}; });
}

/// Also where ranks have unequal parts, or nothing.
TEST(Packed, ASliceOfAllIsCutNowhere) {
  for (const int64_t size : {1, 3, 5, 8}) {
    const auto x = values({size, 2});
    const auto packed = distribute_tensor(x, line_mesh(), {StridedShard{0, 2}});
    const auto kept = packed.slice(0, 0, size);
    EXPECT_EQ(placements_of(kept), packed.placements());
    EXPECT_TENSORS_EQUAL(DTensor(kept).local(), packed.local());
    EXPECT_TENSORS_EQUAL(whole(kept), x);
  }
}

TEST(Packed, PartsOfAChunkAreCutAsWell) {
  const auto n = world_size();
  const auto x = values({3 * 2 * n, 2});
  const auto part = distribute_tensor(x, line_mesh(), {StridedShard{0, 3}});
  for (const auto& [first, last, step] :
       std::vector<std::array<int64_t, 3>>{{0, n, 1}, {1, 2 * n + 1, 1}, {0, 6 * n, 2}, {3, 3, 1}})
    EXPECT_TENSORS_EQUAL(whole(part.slice(0, first, last, step)), x.slice(0, first, last, step));
  EXPECT_TENSORS_EQUAL(whole(part.select(0, n)), x.select(0, n));
}

TEST(Packed, TensorsSideBySideAreChunks) {
  const auto n = world_size();
  const auto a = values({2, 2 * n}), b = a + 100;
  const auto both = torch::cat({distribute_tensor(a, line_mesh(), {Shard{1}}), distribute_tensor(b, line_mesh(), {Shard{1}})}, 1);
  EXPECT_EQ(placements_of(both), (Placements{StridedShard{1, 2}}));
  EXPECT_TENSORS_EQUAL(whole(both), (torch::cat({a, b}, 1)));
  const auto uneven = values({2, 2 * n + 1});
  const auto part = distribute_tensor(uneven, line_mesh(), {Shard{1}});
  EXPECT_TENSORS_EQUAL((whole(torch::cat({part, part}, 1))), (torch::cat({uneven, uneven}, 1)));
  const auto none = distribute_tensor(values({2, 0}), line_mesh(), {Shard{1}});
  EXPECT_EQ(torch::cat({none, none}, 1).size(1), 0);
}

/// [t, b, h * d] and [t, b * h, d], as in torch::nn::MultiheadAttention.
TEST(Packed, HeadsMergeWithTheBatch) {
  const auto n = world_size();
  for (const int64_t batch : {1, 3}) {
    const auto merged = run(values({2, batch, 2 * n * 5}), Shard{2}, [&](const Tensor& y) {
      return std::vector<Tensor>{y.view({2, batch * 2 * n, 5})};
    });
    if (n > 1)
      EXPECT_EQ(merged, (std::vector<Placements>{batch == 1 ? Placements{Shard{1}} : Placements{StridedShard{1, batch}}}));
  }
  const auto few = distribute_tensor(values({2, 3, 5 * n}), line_mesh(), {Shard{2}});
  const std::vector<int64_t> other{2, 3 * 5, n};
  EXPECT_TENSORS_EQUAL(whole(few.view(other)), values({2, 3, 5 * n}).view(other));
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{0, 3, 4 * n}, {2, 0, 4 * n}, {2, 3, 0}}) {
    const auto empty = distribute_tensor(values(sizes), line_mesh(), {Shard{2}});
    EXPECT_EQ(empty.view({sizes[0], sizes[1] * 2 * n, sizes[2] / (2 * n)}).numel(), 0);
  }
}

TEST(Packed, SoftmaxOfPartsOfARow) {
  const auto n = world_size();
  const auto x = values({2, 3 * 2 * n}).sin();
  const auto part = distribute_tensor(x, line_mesh(), {StridedShard{1, 3}});
  for (const int64_t dim : {0, 1}) {
    EXPECT_EQ(placements_of(torch::softmax(part, dim)), placements_of(part));
    EXPECT_TENSORS_CLOSE(whole(torch::softmax(part, dim)), torch::softmax(x, dim), 1e-12);
    EXPECT_TENSORS_CLOSE(whole(torch::log_softmax(part, dim)), torch::log_softmax(x, dim), 1e-12);
  }
}

} // namespace
} // namespace tessera::testing::packed_test
