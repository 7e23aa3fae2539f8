// Where NaN comes from: operator, module, rank.
#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include <tessera/activations/recompute.h>
#include <tessera/training/nan_guard.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::nan_guard_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Two layers, and what happens between and after them.
struct PairImpl : torch::nn::Module {
  PairImpl()
      : first(register_module("first", torch::nn::Linear(4, 4))), second(register_module("second", torch::nn::Linear(4, 3))) {}
  Tensor forward(const Tensor& x) {
    auto hidden = between(first->forward(x));
    return after(second->forward(hidden));
  }
  std::function<Tensor(const Tensor&)> between = [](const Tensor&x) { return x; }, after = between;
  torch::nn::Linear first, second;
};
TORCH_MODULE(Pair);

Pair sharded_pair() {
  torch::manual_seed(3);
  Pair pair;
  const auto mesh = world_mesh();
  fully_shard(*pair->first, mesh);
  fully_shard(*pair->second, mesh);
  fully_shard(*pair, mesh);
  return pair;
}

Tensor input() { return torch::ones({2, 4}, test_device()); }

bool is_last() { return world_rank() == last_rank(); }

std::string first_on_the_last_rank() { return c10::str("NanGuard: first on rank ", last_rank(), ": "); }

/// Memory that nobody has written holds NaN meanwhile.
class FilledMemory {
 public:
  FilledMemory() { at::globalContext().setDeterministicAlgorithms(true, true); }
  ~FilledMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
  FilledMemory(const FilledMemory&) = delete;
  FilledMemory& operator=(const FilledMemory&) = delete;
};

TEST(NanGuard, FindsNothingInTrainingWithoutNan) {
  const FilledMemory memory;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::manual_seed(0);
    Net net;
    shard_model(net, strategy);
    torch::optim::AdamW optimizer(net->parameters());
    NanGuard guard(*net, NanGuardWatch::kNanOrInfinity);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net->forward(torch::randint(0, 61, {2, 5}, torch::kLong)).sum().backward();
      optimizer.step();
      EXPECT_NO_THROW(guard.check());
    }
  }
}

TEST(NanGuard, NamesTheOperatorTheModuleAndTheRankInForward) {
  auto pair = sharded_pair();
  NanGuard guard(*pair);
  pair->between = [](const Tensor& x) { return is_last() ? torch::log(-x.abs() - 1) : x; };
  pair->forward(input()).sum().backward();
  torch::optim::SGD(pair->parameters(), 0.1).step();
  const auto error = error_of([&] { guard.check(); });
  EXPECT_THAT(error, HasSubstr(first_on_the_last_rank() + "aten::log made NaN in forward, after module 'first' (operator "));
  for (int64_t rank = 0; rank < last_rank(); ++rank) // it has come with the reduction, and the optimizer reads it
    EXPECT_THAT(error, HasSubstr(c10::str("then on rank ", rank, ": ")));
}

TEST(NanGuard, NamesTheNodeAndTheModuleInBackward) {
  auto pair = sharded_pair();
  NanGuard guard(*pair);
  pair->between = [](const Tensor& x) { return is_last() ? torch::sqrt(x * 0) * 0 : x; }; // 0 / 0
  pair->forward(input()).sum().backward();
  EXPECT_THAT(
      error_of([&] { guard.check(); }),
      AllOf(HasSubstr(first_on_the_last_rank() + "aten::div made NaN in backward, in SqrtBackward0 of module 'first' or of "),
            HasSubstr("what comes after it")));
}

TEST(NanGuard, TellsAHookOfBackwardFromForward) {
  auto pair = sharded_pair();
  NanGuard guard(*pair);
  pair->between = [](const Tensor& x) {
    if (is_last()) x.register_hook([](const Tensor& gradient) { return gradient / 0.0 * 0; });
    return x;
  };
  pair->forward(input()).sum().backward();
  EXPECT_THAT(error_of([&] { guard.check(); }),
              HasSubstr(first_on_the_last_rank() + "aten::mul made NaN in backward, in a hook after "));
}

TEST(NanGuard, SaysThatAnInputOrAWeightHasIt) {
  auto pair = sharded_pair();
  NanGuard guard(*pair);
  pair->forward(is_last() ? input() * kNan : input());
  EXPECT_THAT(error_of([&] { guard.check(); }), HasSubstr(first_on_the_last_rank()));

  const torch::NoGradGuard no_grad;
  pair->second->bias.fill_(kNan);
  pair->forward(input());
  // The simulated device runs an operator more where it meets a shape for the first time, which another rank may know.
  const std::string first = test_device_type() == at::kPrivateUse1 ? " on rank 0: " : "NanGuard: first on rank 0: ";
  EXPECT_THAT(error_of([&] { guard.check(); }), AllOf(HasSubstr(first), HasSubstr(" got NaN in forward, in module 'second'")));
}

TEST(NanGuard, BeginsAnewAtEachCheckAndForTheNextGuard) {
  auto pair = sharded_pair();
  const auto log_of = [&](double value) {
    const torch::NoGradGuard no_grad;
    pair->after = [=](const Tensor& x) { return torch::log(x * 0 + value); };
    pair->forward(input());
  };
  {
    NanGuard guard(*pair);
    EXPECT_THROWS_WITH(NanGuard{*pair}, "NanGuard: there is one already in this process");
    log_of(-1);
    EXPECT_THROWS_WITH(guard.check(), "aten::log made NaN in forward, after module 'second'");
    EXPECT_NO_THROW(guard.check());
    log_of(0);
    EXPECT_NO_THROW(guard.check());
  }
  log_of(-1); // nobody looks
  NanGuard guard(*pair, NanGuardWatch::kNanOrInfinity);
  EXPECT_NO_THROW(guard.check());
  log_of(0);
  EXPECT_THROWS_WITH(guard.check(), "aten::log made NaN or infinity in forward, after module 'second'");
}

TEST(NanGuard, LooksAtAModelThatIsNotSharded) {
  Pair pair;
  pair->to(test_device());
  pair->after = [](const Tensor& x) { return torch::log(-x.abs() - 1); };
  NanGuard guard(*pair);
  pair->forward(input()).sum().backward();
  EXPECT_THROWS_WITH(guard.check(), "first on rank 0: aten::log made NaN in forward, after module 'second'");
}

TEST(NanGuard, CallsNothingThatARecomputationKeeps) {
  const Pair model;
  const auto x = torch::ones({3}).requires_grad_();
  RecomputeOptions options;
  options.keep = [](const c10::OperatorHandle& op, auto) { return op.operator_name().name == "aten::any"; };
  Tensor y;
  {
    const NanGuard guard(*model);
    const auto function = [](const Tensor& x) { return x.exp() * (x > 0).any().to(torch::kFloat); };
    y = recompute(options, function, x);
  }
  y.sum().backward(); // without the guard: the first `any` of the second run is the function's own
  EXPECT_TRUE(torch::allclose(x.grad(), x.detach().exp()));
}

} // namespace
} // namespace tessera::testing::nan_guard_test
