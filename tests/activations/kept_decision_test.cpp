// What a function that is recomputed decides once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/kept_decision.h>
#include <tessera/activations/recompute.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::kept_decision_test {
namespace {

using torch::Tensor;

/// Counts, and decides something else each time.
struct Decides {
  Tensor operator()(const Tensor& x) {
    const auto decided = internal::decided_once([this] { return std::vector{torch::full({}, static_cast<double>(++calls))}; })[0];
    seen.push_back(decided.item<double>());
    return (x * decided).sin();
  }
  int64_t calls = 0;
  std::vector<double> seen;
};

TEST(KeptDecision, IsMadeEachTimeWithoutRecompute) {
  Decides decides;
  decides(torch::ones({2}));
  decides(torch::ones({2}));
  EXPECT_EQ(decides.seen, (std::vector<double>{1, 2}));
}

TEST(KeptDecision, IsThatOfTheFirstRun) {
  Decides decides;
  const auto x = torch::ones({2}).requires_grad_();
  const auto run = [&](const Tensor& input) { return decides(decides(input)); };
  const auto y = recompute(run, x), z = recompute(run, y);
  const auto gradient = torch::autograd::grad({z.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  EXPECT_EQ(decides.calls, 4);
  EXPECT_EQ(decides.seen, (std::vector<double>{1, 2, 3, 4, 3, 4, 1, 2}));
  EXPECT_TENSORS_EQUAL(torch::autograd::grad({z.sum()}, {x})[0], gradient);
  EXPECT_EQ(decides.calls, 4);
}

TEST(KeptDecision, IsThatOfTheFirstRunInNestedOnes) {
  Decides decides;
  const auto x = torch::ones({2}).requires_grad_();
  const auto inner = [&](const Tensor& input) { return decides(input); };
  const auto outer = [&](const Tensor& input) { return recompute(inner, decides(recompute(inner, input))); };
  recompute(outer, x).sum().backward();
  EXPECT_EQ(decides.calls, 3);
  const auto once = torch::ones({2}).requires_grad_();
  (((once * 1).sin() * 2).sin() * 3).sin().sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), once.grad(), 1e-6, 1e-6);
}

TEST(KeptDecision, IsAnErrorWhereTheSecondRunDecidesMore) {
  Decides decides;
  bool is_second = false;
  const auto run = [&](const Tensor& input) {
    auto y = decides(input);
    if (is_second) y = decides(y);
    is_second = true;
    return y.sin();
  };
  const auto y = recompute(run, torch::ones({2}).requires_grad_());
  EXPECT_THROWS_WITH(y.sum().backward(), "decides more in its second run than in its first");
}

} // namespace
} // namespace tessera::testing::kept_decision_test
