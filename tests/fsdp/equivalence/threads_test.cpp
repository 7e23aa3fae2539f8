// Threads: a model used from several threads in turn, two models in one process, an optimizer on a thread of its own.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/fsdp/equivalence/layers.h>

namespace tessera::testing::threads_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

/// Runs `work` on a thread of its own and waits for it.
void on_another_thread(const std::function<void()>& work) { std::async(std::launch::async, work).get(); }

/// Every forward, every backward and every iteration on another thread.
struct ThreadsInTurn : Layers {
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto x = input_of(step, rank);
      Tensor part;
      on_another_thread([&] { part = watched(loss(x) / static_cast<double>(ranks.size())); });
      on_another_thread([&] { part.backward(); });
      total += part.item<double>();
    }
    return total;
  }
};

/// Two models that share nothing, their passes interleaved.
struct TwoModels : CaseModel {
  TwoModels() : one(std::make_shared<Layers>()), other(register_module("other", std::make_shared<Layers>())) {
    register_module("one", one);
  }
  Tensor loss(const Tensor& x) override { return one->loss(x) + other->loss(x * 0.5); }
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto x = input_of(step, rank);
      const auto first = watched(one->loss(x) / static_cast<double>(ranks.size()));
      const auto second = watched(other->loss(x * 0.5) / static_cast<double>(ranks.size()));
      first.backward();
      second.backward();
      total += (first + second).item<double>();
    }
    return total;
  }
  // Each is sharded as a model of its own.
  std::vector<std::shared_ptr<nn::Module>> units() override { return {one, other}; }
  Allowance allowance() const override {
    return {2, "backward through one model does not end at the first group of the other, which is prefetched in vain"};
  }
  std::shared_ptr<Layers> one, other;
};

class Threads : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Threads, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Equivalence, Threads,
                         ::testing::ValuesIn(with_all_strategies({equivalence_case<ThreadsInTurn>("threads_in_turn"),
                                                                  equivalence_case<TwoModels>("two_models")})),
                         param_name);

TEST(Threads, TwoIndependentModelsInterleaveTheirPasses) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto build = [](uint64_t seed) {
      torch::manual_seed(seed);
      return std::make_shared<Layers>();
    };
    auto plain_one = build(1), plain_two = build(2), one = build(1), two = build(2);
    shard_case(*one, strategy);
    shard_case(*two, strategy);
    const auto run = [](Layers& first, Layers& second) {
      torch::optim::SGD first_optimizer(first.parameters(), 0.1), second_optimizer(second.parameters(), 0.1);
      double last = 0;
      for (int64_t step = 0; step < 3; ++step) {
        first_optimizer.zero_grad();
        second_optimizer.zero_grad();
        const auto x = first.input_of(step, 0);
        const auto a = first.loss(x);
        const auto b = second.loss(x);
        a.backward();
        b.backward();
        first_optimizer.step();
        second_optimizer.step();
        last = (a + b).item<double>();
      }
      return last;
    };
    EXPECT_NEAR(run(*one, *two), run(*plain_one, *plain_two), 1e-5);
    EXPECT_LE(parameter_difference(*one, *plain_one), 1e-5);
    EXPECT_LE(parameter_difference(*two, *plain_two), 1e-5);
  }
}

/// A hook of the backward waits for the thread.
TEST(Threads, AHookMayEvaluateOnAnotherThread) {
  if (!tests_the_cpu()) GTEST_SKIP() << "on a device a backward that has thrown looks the same from another thread";
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Layers>(strategy), twin = sharded_case<Layers>(strategy);
    const auto x = model->input_of(0, world_rank());
    double evaluated = 0;
    const auto hidden = model->hidden(x);
    hidden.register_hook([&](const Tensor& gradient) {
      on_another_thread([&] {
        const torch::NoGradGuard no_grad;
        evaluated = model->loss(x).item<double>();
      });
      return gradient;
    });
    model->head(hidden).square().mean().backward();
    const auto loss = twin->loss(x);
    loss.backward();
    EXPECT_NEAR(evaluated, loss.item<double>(), 1e-6);
    const auto expected = twin->parameters(), got = model->parameters();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(got[i].grad().defined());
      EXPECT_TRUE(torch::allclose(DTensor(got[i].grad()).full_tensor(), DTensor(expected[i].grad()).full_tensor(), 1e-5, 1e-6));
    }
  }
}

TEST(Threads, AHookMayReadOnAnotherThreadWhatItsForwardDidNot) {
  if (!tests_the_cpu()) GTEST_SKIP() << "on a device a backward that has thrown looks the same from another thread";
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh());
  fully_shard(*net, world_mesh());
  const auto layer = [&](size_t i) { return net[i]->as<torch::nn::Linear>(); };
  const auto x = torch::ones({2, 4});
  const auto hidden = layer(0)->forward(x);
  bool evaluates = false;
  hidden.register_hook([&](const Tensor& gradient) {
    if (evaluates) {
      on_another_thread([&] {
        const torch::NoGradGuard no_grad;
        layer(2)->forward(x);
      });
    }
    return gradient;
  });
  const auto loss = layer(1)->forward(hidden).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = DTensor(layer(0)->weight.grad()).full_tensor().clone();
  evaluates = true;
  loss.backward();
  EXPECT_TRUE(torch::allclose(DTensor(layer(0)->weight.grad()).full_tensor(), 2 * once));
  EXPECT_FALSE(layer(2)->weight.grad().defined());
}

} // namespace
} // namespace tessera::testing::threads_test
