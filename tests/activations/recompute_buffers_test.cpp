// The buffers of a module that is recomputed.
#include <tessera/activations/recompute.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>

#include <tessera/tests/activations/small_mlp.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::recompute_buffers_test {
namespace {

using torch::Tensor;

TEST(Recompute, UpdatesTheBuffersOfAModuleOnce) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(6), torch::nn::ReLU());
  recompute(net, input()).square().sum().backward();
  const auto& norm = net[0]->as<torch::nn::BatchNorm1d>();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  EXPECT_TRUE(torch::allclose(norm->running_mean, 0.1 * input().detach().mean(0)));
  const auto y = recompute(net, input());
  y.sum().backward({}, /*retain_graph=*/true);
  y.sum().backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() : count(register_buffer("count", torch::ones({6}))) {}
  Tensor forward(const Tensor& x) {
    auto y = x * count.tanh();
    count.add_(1);
    return y;
  }
  Tensor count;
};

TEST(Recompute, FindsTheBuffersAsTheFirstRunDid) {
  const auto counting = std::make_shared<CountingImpl>();
  const auto x = input();
  const auto first = recompute(counting, x), second = recompute(counting, x);
  second.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), torch::full({4, 6}, 2.0).tanh()));
  first.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), torch::full({4, 6}, 2.0).tanh() + torch::full({4, 6}, 1.0).tanh()));
  EXPECT_EQ(counting->count[0].item<double>(), 3);
}

/// Two calls of a module that multiplies by exp(2) in each.
template <typename Module>
void expect_both_calls_recomputed(const std::shared_ptr<Module>& module) {
  const auto x = input();
  const auto first = recompute(module, x), second = recompute(module, x);
  first.sum().backward();
  second.sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), torch::full({4, 6}, 2 * std::exp(2.0)), 1e-5, 1e-5);
}

/// Whose first call fills a table that later ones read: the backward of the first is nobody else's write.
TEST(Recompute, SecondRunsWriteNoBufferOfOtherCalls) {
  struct LazyImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      if (table[0].item<double>() == 0) {
        const torch::NoGradGuard no_grad;
        table.fill_(2);
      }
      return x * table.exp();
    }
    Tensor table = register_buffer("table", torch::zeros({6}));
  };
  expect_both_calls_recomputed(std::make_shared<LazyImpl>());
}

TEST(Recompute, RefusesABufferThatSomethingElseWroteSince) {
  struct WarmImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) { return x * temperature.tanh(); }
    Tensor temperature = register_buffer("temperature", torch::ones({}));
  };
  const auto warm = std::make_shared<WarmImpl>();
  const auto y = recompute(warm, input());
  warm->temperature.mul_(0.5);
  EXPECT_THROWS_WITH(y.sum().backward(), "the buffer temperature was modified by an inplace operation since the forward");
}

TEST(Recompute, TakesModulesWithBuffersOnTheMetaDevice) {
  struct MaskedImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) { return (x * mask).exp(); }
    Tensor mask = register_buffer("mask", torch::ones({6}, torch::kMeta));
  };
  const auto x = torch::empty({4, 6}, torch::kMeta).requires_grad_(true);
  recompute(std::make_shared<MaskedImpl>(), x).sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
}

/// As kernels write running statistics; and no longer once it is frozen.
TEST(Recompute, FindsBuffersThatAreWrittenWithoutANewVersion) {
  struct SilentImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      auto y = x * count.tanh();
      if (is_training()) count.data().add_(1);
      return y;
    }
    Tensor count = register_buffer("count", torch::ones({6}));
  };
  const auto silent = std::make_shared<SilentImpl>();
  const auto x = input();
  const auto first = recompute(silent, x), second = recompute(silent, x);
  silent->eval();
  const auto third = recompute(silent, x);
  silent->count.fill_(7);
  third.sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), torch::full({4, 6}, std::tanh(3.0)), 1e-5, 1e-5);
  silent->train();
  first.sum().backward();
  second.sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), torch::full({4, 6}, std::tanh(1.0) + std::tanh(2.0) + std::tanh(3.0)), 1e-5, 1e-5);
  EXPECT_TENSORS_EQUAL(silent->count, torch::full({6}, 7.0));
}

/// A table that each call fills anew: the next call's write is none of something else.
TEST(Recompute, FindsBuffersThatAreWrittenWithTheValuesThatTheyHave) {
  struct RefillingImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      table.fill_(2);
      return x * table.exp();
    }
    Tensor table = register_buffer("table", torch::full({6}, 2.0));
  };
  expect_both_calls_recomputed(std::make_shared<RefillingImpl>());
}

} // namespace
} // namespace tessera::testing::recompute_buffers_test
