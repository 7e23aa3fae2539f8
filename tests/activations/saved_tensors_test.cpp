#include <tessera/activations/recompute.h>
#include <tessera/activations/saved_tensors.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <thread>

#include <tessera/tests/activations/small_mlp.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::saved_tensors_test {
namespace {

using torch::Tensor;

TEST(SavedTensors, LieInAPlaceUntilBackward) {
  auto mlp = make_mlp(0.5);
  const auto x = input();
  const auto run = [&](const std::function<Tensor()>& forward) {
    torch::manual_seed(2);
    const auto y = forward();
    y.square().sum().backward({}, /*retain_graph=*/true);
    y.square().sum().backward();
    return gradients_of(*mlp, x);
  };
  const auto expected = run([&] { return mlp(x); });
  int64_t kept = 0;
  const TensorPlace place = [&](const Tensor& tensor) -> std::function<Tensor()> {
    ++kept;
    return [copy = tensor.clone()] { return copy.clone(); };
  };
  expect_same(run([&] {
                const auto scope = saved_tensors_in(place);
                return mlp(x);
              }),
              expected);
  EXPECT_GT(kept, 5);
  kept = 0;
  expect_same(run([&] {
                const auto scope = saved_tensors_in(place);
                return recompute(mlp, x);
              }),
              expected);
  EXPECT_EQ(kept, 1); // the input
  expect_same(run([&] {
                const auto scope = saved_tensors_in(host_memory());
                return mlp(x);
              }),
              expected);
}

TEST(SavedTensors, AreRefusedWhereTheyWereChangedInPlaceAndNotCopied) {
  const auto x = input();
  const auto save = [&](const TensorPlace& place) {
    const auto scope = saved_tensors_in(place);
    auto y = x.exp(); // saves itself
    y.add_(1);
    return y.sum();
  };
  EXPECT_THROWS_WITH(save(host_memory()).backward(), "was modified by an inplace operation");
  save([](const Tensor& tensor) -> std::function<Tensor()> { return [copy = tensor.clone()] { return copy; }; }).backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.detach().exp()));
}

/// The memory of one that is gone may be that of the copy.
TEST(SavedTensors, ComeBackAsTheyWereFromAPlaceThatCopies) {
  const auto copying = [](const Tensor& tensor) {
    const auto copy = tensor.clone();
    return [copy] { return copy.clone(); };
  };
  for (int64_t size = 1; size <= 100'000; size *= 10) {
    const auto x = torch::ones({size}).requires_grad_(true);
    Tensor sum;
    {
      const auto scope = saved_tensors_in(copying);
      auto y = x.exp();
      y.add_(1);
      sum = y.sum();
    }
    sum.backward();
    EXPECT_TENSORS_CLOSE(x.grad(), torch::ones({size}).exp(), 1e-6, 1e-6);
  }
}

/// A place that counts the tensors it gets.
TensorPlace counting(int64_t& count) {
  return [&count](const Tensor& tensor) -> std::function<Tensor()> {
    ++count;
    return [tensor] { return tensor; };
  };
}

TEST(SavedTensors, LieWhereTheInnermostOpenScopeSaysInWhicheverOrderScopesEnd) {
  const auto x = input();
  int64_t in_first = 0, in_second = 0;
  const auto expect_saved_in = [&](const int64_t* place) {
    in_first = in_second = 0;
    x.exp();
    EXPECT_EQ(in_first, place == &in_first ? 1 : 0);
    EXPECT_EQ(in_second, place == &in_second ? 1 : 0);
  };
  auto scope = std::make_unique<SavedTensorScope>(counting(in_first));
  expect_saved_in(&in_first);
  scope = std::make_unique<SavedTensorScope>(counting(in_second)); // begins before the other ends
  expect_saved_in(&in_second);
  scope.reset();
  expect_saved_in(nullptr);
  auto outer = std::make_unique<SavedTensorScope>(counting(in_first));
  recompute(
      [&](const Tensor& in) {
        outer.reset();
        return in.exp();
      },
      x)
      .sum()
      .backward();
  EXPECT_TENSORS_CLOSE(x.grad(), x.detach().exp());
  expect_saved_in(nullptr);
}

TEST(SavedTensors, AScopeMayEndOnAnotherThread) {
  const auto x = input();
  int64_t kept = 0, there = 0;
  auto scope = std::make_unique<SavedTensorScope>(counting(kept));
  std::thread([&] {
    const auto own = saved_tensors_in(counting(there));
    scope.reset();
    x.exp();
  }).join();
  EXPECT_EQ(there, 1);
  x.exp();
  EXPECT_EQ(kept, 0);
  std::thread([&] { scope = std::make_unique<SavedTensorScope>(counting(kept)); }).join();
  scope.reset(); // after its thread
  x.exp();
  EXPECT_EQ(kept, 0);
}

TEST(SavedTensors, RefuseAPlaceThatBringsBackOtherTensors) {
  const auto x = input();
  const auto run = [&](const TensorPlace& place) {
    const auto scope = saved_tensors_in(place);
    return x.exp();
  };
  const auto y = run([](const Tensor& tensor) -> std::function<Tensor()> { return [tensor] { return tensor.narrow(0, 0, 1); }; });
  EXPECT_THROWS_WITH(y.sum().backward(), "brought back float [1, 6] on cpu");
  EXPECT_THROWS_WITH(run([](const Tensor&) -> std::function<Tensor()> { return {}; }), "returned no function");
  EXPECT_THROWS_WITH(const auto scope = saved_tensors_in({}), "the place is empty");
}

} // namespace
} // namespace tessera::testing::saved_tensors_test
