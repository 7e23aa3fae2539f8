// Tokens that go to the ranks of their experts, and come back.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/parallel/experts.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

#include <cmath>
#include <limits>

namespace tessera::testing::dispatch_test {
namespace {

using torch::Tensor;

constexpr int64_t kExperts = 12, kWidth = 8, kHidden = 12;

/// Weights, tokens and logits that all ranks draw alike.
struct Problem {
  explicit Problem(int64_t tokens, torch::Dtype dtype = torch::kFloat) {
    auto generator = at::detail::createCPUGenerator(7);
    const auto draw = [&](const std::vector<int64_t>& shape) { return torch::randn(shape, generator).to(dtype); };
    x = draw({tokens, kWidth});
    logits = draw({tokens, kExperts});
    up = draw({kExperts, kHidden, kWidth}) * 0.3;
    down = draw({kExperts, kWidth, kHidden}) * 0.3;
  }
  Tensor x, logits, up, down;
};

Tensor experts_on(const Tensor& tokens, const std::vector<int64_t>& counts, const Tensor& up, const Tensor& down) {
  return grouped_linear(torch::gelu(grouped_linear(tokens, counts, up)), counts, down);
}

/// Each token by itself, of all experts.
Tensor plainly(const Problem& problem, const Routing& routing) {
  std::vector<Tensor> rows;
  for (int64_t token = 0; token < problem.x.size(0); ++token) {
    auto sum = torch::zeros({kWidth}, problem.x.options());
    for (int64_t choice = 0; choice < routing.experts.size(1); ++choice) {
      const auto expert = routing.experts[token][choice].item<int64_t>();
      if (expert < 0) continue;
      const auto hidden = torch::gelu(torch::linear(problem.x[token], problem.up[expert]));
      sum = sum + torch::linear(hidden, problem.down[expert]) * routing.weights[token][choice];
    }
    rows.push_back(sum);
  }
  const auto none = problem.x.sum() + problem.logits.sum() + problem.up.sum() + problem.down.sum(); // what all depends on
  return rows.empty() ? torch::zeros({0, kWidth}, problem.x.options()) + none : torch::stack(rows) + none * 0;
}

struct Results {
  Tensor y, x, logits, up, down; ///< the output, and gradients
};

Results alone(Problem problem, const RouteOptions& options, const std::function<Routing(Routing)>& limit = nullptr) {
  for (auto* each : {&problem.x, &problem.logits, &problem.up, &problem.down}) *each = each->clone().requires_grad_();
  auto routing = route(problem.logits, options);
  if (limit) routing = limit(routing);
  const auto y = plainly(problem, routing);
  y.sin().sum().backward();
  return {y.detach(), problem.x.grad(), problem.logits.grad(), problem.up.grad(), problem.down.grad()};
}

/// This rank's rows [first, last).
Results on_ranks(const Problem& problem, const DeviceMesh& mesh, int64_t first, int64_t last, const RouteOptions& options,
                 const std::function<Routing(Routing)>& limit = nullptr) {
  const auto own = kExperts / mesh.size();
  const auto part = [&](const Tensor& weights) {
    return weights.slice(0, mesh.local_rank() * own, mesh.local_rank() * own + own).clone().requires_grad_();
  };
  const auto x = problem.x.slice(0, first, last).clone().requires_grad_(), up = part(problem.up), down = part(problem.down);
  const auto logits = problem.logits.slice(0, first, last).clone().requires_grad_();
  auto routing = route(logits, options);
  if (limit) routing = limit(routing);
  const auto sent = dispatch(x, routing, mesh);
  const auto y = combine(experts_on(sent.tokens, sent.counts, up, down), sent, routing);
  y.sin().sum().backward();
  return {y.detach(), x.grad(), logits.grad(), up.grad(), down.grad()};
}

void expect_part(const Results& got, const Results& whole, const DeviceMesh& mesh, int64_t first, int64_t last, double bound) {
  const auto own = kExperts / mesh.size(), expert = mesh.local_rank() * own;
  EXPECT_TENSORS_CLOSE(got.y, whole.y.slice(0, first, last), bound, bound);
  EXPECT_TENSORS_CLOSE(got.x, whole.x.slice(0, first, last), bound, bound);
  EXPECT_TENSORS_CLOSE(got.logits, whole.logits.slice(0, first, last), bound, bound);
  EXPECT_TENSORS_CLOSE(got.up, whole.up.slice(0, expert, expert + own), bound, bound);
  EXPECT_TENSORS_CLOSE(got.down, whole.down.slice(0, expert, expert + own), bound, bound);
}

DeviceMesh world_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"ep"}); }

/// Rows of uneven number, of which the last rank has none where there are several.
std::pair<int64_t, int64_t> uneven_rows(int64_t tokens) {
  const auto world = world_size(), rank = world_rank();
  if (world == 1) return {0, tokens};
  if (rank == world - 1) return {tokens, tokens};
  const auto each = tokens / (world - 1);
  return {rank * each, rank == world - 2 ? tokens : (rank + 1) * each};
}

TEST(Dispatch, ComputesWhatOneProcessDoes) {
  const auto mesh = world_mesh();
  for (const auto dtype : {torch::kFloat, torch::kDouble}) { // by the kernel, and by the loop
    for (const int64_t top_k : {1, 2, 5}) {
      for (const int64_t tokens : {0, 1, 31}) {
        SCOPED_TRACE(c10::str(dtype, " top ", top_k, " of ", tokens));
        const Problem problem(tokens, dtype);
        const RouteOptions options{.top_k = top_k};
        const auto [first, last] = uneven_rows(tokens);
        const auto got = on_ranks(problem, mesh, first, last, options);
        expect_part(got, alone(problem, options), mesh, first, last, dtype == torch::kFloat ? 1e-5 : 1e-12);
        const auto again = on_ranks(problem, mesh, first, last, options);
        EXPECT_TRUE(torch::equal(got.y, again.y) && torch::equal(got.x, again.x) && torch::equal(got.up, again.up));
      }
    }
  }
}

TEST(Dispatch, TakesAllTokensToOneExpert) {
  const auto mesh = world_mesh();
  for (const int64_t expert : {int64_t{0}, kExperts - 1}) {
    Problem problem(20);
    problem.logits = problem.logits.index_fill(1, torch::tensor({expert}), 9.0);
    const auto [first, last] = uneven_rows(20);
    const auto got = on_ranks(problem, mesh, first, last, {.top_k = 1});
    expect_part(got, alone(problem, {.top_k = 1}), mesh, first, last, 1e-5);
    EXPECT_TRUE(got.up.defined()) << "zeros, where there are no tokens";
  }
}

TEST(Dispatch, LeavesDroppedChoicesOut) {
  const auto mesh = world_mesh();
  const Problem problem(24);
  const auto [first, last] = uneven_rows(24);
  for (const auto drop : {CapacityDrop::kLowestScore, CapacityDrop::kLastToken}) {
    const auto whole = alone(problem, {}, [&](const Routing& routing) { return limit_to_capacity(routing, {0.5, drop}); });
    const auto got = on_ranks(problem, mesh, first, last, {}, [&](const Routing& routing) {
      return limit_to_capacity(routing, {0.5, drop}, mesh);
    });
    expect_part(got, whole, mesh, first, last, 1e-5);
  }
}

TEST(Dispatch, AddsWhatIsComputedMeanwhile) {
  const auto mesh = world_mesh();
  const Problem problem(10);
  const auto routing = route(problem.logits);
  const auto sent = dispatch(problem.x, routing, mesh);
  const auto own = kExperts / world_size();
  const auto outputs = experts_on(sent.tokens, sent.counts, problem.up.slice(0, world_rank() * own, (world_rank() + 1) * own),
                                  problem.down.slice(0, world_rank() * own, (world_rank() + 1) * own));
  const auto with = combine(outputs, sent, routing, [&] { return problem.x * 2; });
  EXPECT_TENSORS_CLOSE(with, combine(outputs, sent, routing) + problem.x * 2, 1e-6, 1e-6);
  EXPECT_THROWS_WITH(combine(outputs.slice(0, 1), sent, routing), "tokens were dispatched to this rank");
}

/// Rows go out and come back, and so do their gradients, beside the counts.
TEST(Dispatch, SendsWhatTheFormulaSays) {
  const auto mesh = world_mesh();
  const int64_t tokens = 12, top_k = 3, ranks = world_size();
  const Problem problem(tokens * ranks);
  auto& counters = mesh.communicator()->counters();
  counters.reset();
  const auto got = on_ranks(problem, mesh, world_rank() * tokens, (world_rank() + 1) * tokens, {.top_k = top_k});
  const auto routing = route(problem.logits, {.top_k = top_k});
  const auto own = kExperts / ranks;
  const auto mine = routing.experts.slice(0, world_rank() * tokens, (world_rank() + 1) * tokens).numel();
  const auto received = routing.counts.slice(0, world_rank() * own, (world_rank() + 1) * own).sum().item<int64_t>();
  const auto rows = std::max(mine, received) * kWidth * 4, counts = (kExperts + ranks) * 8;
  const auto count = counters.get(CollectiveKind::kAllToAll);
  EXPECT_EQ(count.calls, ranks == 1 ? 0 : 5);
  EXPECT_EQ(count.bytes, ranks == 1 ? 0 : 4 * rows + counts);
}

TEST(Dispatch, TellsAllRanksOfANaN) {
  const auto mesh = world_mesh();
  Problem problem(8);
  const auto bad = world_size() - 1;
  if (world_rank() == bad) problem.logits[3].fill_(std::numeric_limits<float>::quiet_NaN());
  const auto routing = route(problem.logits);
  if (world_rank() == bad) {
    EXPECT_THROWS_WITH(dispatch(problem.x, routing, mesh),
                       c10::str("dispatch (rank ", bad, "): the router returned NaN for 1 of 8 tokens"));
  } else {
    EXPECT_THROWS_WITH(dispatch(problem.x, routing, mesh), c10::str("on rank ", bad, " the router returned NaN"));
  }
  Problem good(8); // nothing is left over
  EXPECT_EQ(dispatch(good.x, route(good.logits), mesh).counts.size(), static_cast<size_t>(kExperts / world_size()));
}

TEST(Dispatch, TellsAllRanksOfARoutingThatDoesNotFit) {
  const auto mesh = world_mesh();
  const Problem problem(8);
  auto routing = route(problem.logits);
  if (world_rank() == 0) routing.experts[0][0] = kExperts;
  EXPECT_THROWS_WITH(dispatch(problem.x, routing, mesh),
                     world_rank() == 0 ? "names an expert outside of [0, 12)" : "on rank 0 the routing does not fit its tokens");
  EXPECT_THROWS_WITH(dispatch(world_rank() == 0 ? problem.x.slice(0, 1) : problem.x, route(problem.logits), mesh),
                     world_rank() == 0 ? "the routing is not one of 7 tokens" : "on rank 0 the routing does not fit its tokens");
  if (world_size() > 1)
    EXPECT_THROWS_WITH(dispatch(problem.x, route(problem.logits.slice(1, 0, 11), {.top_k = 1}), mesh),
                       c10::str("11 experts do not divide among the ", world_size(), " ranks"));
}

TEST(GroupedLinear, IsALinearLayerOfEachExpert) {
  for (const auto& [in, out] : {std::pair(8, 12), std::pair(5, 7)}) { // by the kernel, and by the loop
    for (const std::vector<int64_t>& counts : {std::vector<int64_t>{3, 0, 4}, {0, 0, 0}, {0, 7, 0}}) {
      SCOPED_TRACE(c10::str(in, " ", out, " ", counts));
      const auto rows = counts[0] + counts[1] + counts[2];
      const auto x = torch::randn({rows, in}).requires_grad_(), weight = torch::randn({3, out, in}).requires_grad_();
      const auto bias = torch::randn({3, out}).requires_grad_();
      const auto y = grouped_linear(x, counts, weight, bias);
      std::vector<Tensor> parts;
      const auto split = x.split_with_sizes(counts);
      for (int64_t i = 0; i < 3; ++i) parts.push_back(torch::linear(split[static_cast<size_t>(i)], weight[i], bias[i]));
      const auto expected = torch::cat(parts);
      EXPECT_TENSORS_CLOSE(y, expected, 1e-6, 1e-6);
      const auto got = torch::autograd::grad({y.sum()}, {x, weight, bias}); // an expanded gradient
      const auto wanted = torch::autograd::grad({expected.sum()}, {x, weight, bias});
      for (size_t i = 0; i < 3; ++i) EXPECT_TENSORS_CLOSE(got[i], wanted[i], 1e-5, 1e-5);
    }
  }
  EXPECT_THROWS_WITH(grouped_linear(torch::randn({4, 8}), {1, 2}, torch::randn({2, 4, 8})), "the counts sum to 3 tokens");
  EXPECT_THROWS_WITH(grouped_linear(torch::randn({3, 8}), {1, 2}, torch::randn({3, 4, 8})), "with the 2 experts of the counts");
}

} // namespace
} // namespace tessera::testing::dispatch_test
