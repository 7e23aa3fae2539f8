// LibTorch's optimizers, built before or after sharding, with state or without.
#include <gtest/gtest.h>

#include <tessera/optim/shard_optimizer.h>

#include <tessera/tests/fsdp/equivalence/compare_training.h>
#include <tessera/tests/fsdp/equivalence/layers.h>
#include <tessera/tests/support/lion.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::optimizers_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using OptimizerPtr = std::unique_ptr<optim::Optimizer>;

struct NamedOptimizer {
  std::string name;
  std::function<OptimizerPtr(std::vector<torch::Tensor>)> make;
};

template <typename Optimizer, typename Options>
NamedOptimizer named(std::string name, const Options& options) {
  return {std::move(name), [options](std::vector<torch::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

LionOptions smooth_lion() {
  register_lion();
  LionOptions options(0.01);
  options.softness = 0.01;
  options.weight_decay = 0.1;
  return options;
}

std::vector<NamedOptimizer> optimizers() {
  return {named<optim::SGD>("sgd", optim::SGDOptions(0.05)),
          named<optim::SGD>("sgd_nesterov_decay", optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.01)),
          named<optim::Adam>("adam_decay", optim::AdamOptions(0.01).weight_decay(0.01)),
          named<optim::Adam>("adam_amsgrad", optim::AdamOptions(0.01).amsgrad(true)),
          named<optim::AdamW>("adamw", optim::AdamWOptions(0.01).weight_decay(0.1)),
          named<optim::RMSprop>("rmsprop", optim::RMSpropOptions(0.01)),
          named<optim::RMSprop>("rmsprop_centered", optim::RMSpropOptions(0.01).centered(true).momentum(0.5)),
          named<optim::Adagrad>("adagrad_decay", optim::AdagradOptions(0.05).lr_decay(0.1).weight_decay(0.01)),
          named<Lion>("lion", smooth_lion())};
}

struct WithOptimizer : Layers {
  explicit WithOptimizer(NamedOptimizer chosen) : optimizer(std::move(chosen)) {}
  OptimizerPtr make_optimizer() override { return optimizer.make(parameters()); }
  NamedOptimizer optimizer;
};

/// Two groups of parameters with options of their own, the second added later, and a scheduler.
struct GroupsAndScheduler : Layers {
  OptimizerPtr make_optimizer() override {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(a->parameters(), std::make_unique<optim::AdamWOptions>(0.02));
    groups.emplace_back(b->parameters(), std::make_unique<optim::AdamWOptions>(0.01));
    auto made = std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01));
    made->add_param_group(optim::OptimizerParamGroup(head->parameters(), std::make_unique<optim::AdamWOptions>(0.03)));
    scheduler = std::make_unique<optim::StepLR>(*made, 2, 0.5);
    return made;
  }
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    if (step > 0) scheduler->step();
    return Layers::iterate(step, ranks);
  }
  std::unique_ptr<optim::StepLR> scheduler;
};

struct Clips : Layers {
  explicit Clips(bool clip_value) : by_value(clip_value) {}
  double iterate(int64_t step, const std::vector<int64_t>& ranks) override {
    const double loss = Layers::iterate(step, ranks);
    if (by_value) {
      nn::utils::clip_grad_value_(parameters(), 0.01);
      return loss;
    }
    return loss + nn::utils::clip_grad_norm_(parameters(), 0.05) + nn::utils::clip_grad_norm_(parameters(), 0.05, INFINITY);
  }
  bool by_value;
};

std::vector<EquivalenceCase> all_optimizers() {
  std::vector<EquivalenceCase> cases;
  for (const auto& optimizer : optimizers())
    cases.push_back({optimizer.name, [optimizer] { return std::make_shared<WithOptimizer>(optimizer); }});
  cases.push_back(equivalence_case<GroupsAndScheduler>("groups_and_scheduler"));
  cases.push_back({"clip_grad_norm", [] { return std::make_shared<Clips>(false); }});
  cases.push_back({"clip_grad_value", [] { return std::make_shared<Clips>(true); }});
  return cases;
}

class Optimizers : public ::testing::TestWithParam<EquivalenceParam> {};

TEST_P(Optimizers, TrainAsUnsharded) { expect_equivalent(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Equivalence, Optimizers, ::testing::ValuesIn(with_all_strategies(all_optimizers())), param_name);

/// `steps` steps on the same data on every rank.
double train(Layers& model, optim::Optimizer& optimizer, int64_t first, int64_t steps) {
  double last = 0;
  for (int64_t step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    const auto loss = model.loss(model.input_of(step, 0));
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
  }
  return last;
}

TEST(Optimizers, BuiltBeforeShardingWithoutState) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const auto& each : optimizers()) {
      SCOPED_TRACE(strategy.name + " " + each.name);
      auto plain = make_case<Layers>(), model = make_case<Layers>();
      const auto plain_optimizer = each.make(plain->parameters()), optimizer = each.make(model->parameters());
      shard_case(*model, strategy);
      shard_optimizer(*optimizer); // Adagrad's state is made by its constructor
      EXPECT_NEAR(train(*model, *optimizer, 0, 4), train(*plain, *plain_optimizer, 0, 4), 1e-5);
    }
  }
}

TEST(Optimizers, StateFromBeforeShardingIsSharded) {
  for (const auto& strategy : equivalence_strategies()) {
    for (const auto& each : optimizers()) {
      SCOPED_TRACE(strategy.name + " " + each.name);
      auto plain = make_case<Layers>(), model = make_case<Layers>();
      const auto plain_optimizer = each.make(plain->parameters()), optimizer = each.make(model->parameters());
      train(*plain, *plain_optimizer, 0, 2);
      train(*model, *optimizer, 0, 2);
      model->zero_grad();
      shard_case(*model, strategy);
      shard_optimizer(*optimizer);
      EXPECT_NEAR(train(*model, *optimizer, 2, 3), train(*plain, *plain_optimizer, 2, 3), 1e-5);
      EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
    }
  }
}

TEST(Optimizers, PlainStateBesideAShardedParameterIsAnError) {
  for (const auto& each : optimizers()) {
    SCOPED_TRACE(each.name);
    if (each.name == "sgd") continue; // keeps no state
    auto model = make_case<Layers>();
    const auto optimizer = each.make(model->parameters());
    train(*model, *optimizer, 0, 1);
    model->zero_grad();
    shard_case(*model, equivalence_strategies()[0]);
    model->loss(model->input_of(1, 0)).backward();
    EXPECT_THROWS_WITH(optimizer->step(), "the gradient of a.weight"); // with weight decay: computed from it
    EXPECT_THROWS_WITH(optimizer->step(), "tessera::shard_optimizer");
  }
}

TEST(Optimizers, LbfgsWithAClosure) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>(), model = make_case<Layers>();
    shard_case(*model, strategy);
    const auto run = [](Layers& layers) {
      optim::LBFGS optimizer(layers.parameters(), optim::LBFGSOptions(0.5).max_iter(4).history_size(3));
      torch::Tensor loss;
      for (int64_t step = 0; step < 2; ++step) {
        loss = optimizer.step([&] {
          optimizer.zero_grad();
          auto value = layers.loss(layers.input_of(0, 0));
          value.backward();
          return value;
        });
      }
      return loss.item<double>();
    };
    EXPECT_NEAR(run(*model), run(*plain), 1e-5);
    EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
  }
}

TEST(Optimizers, LbfgsFromBeforeShardingGoesOn) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_case<Layers>(), model = make_case<Layers>();
    const auto options = optim::LBFGSOptions(0.5).max_iter(4).history_size(3);
    optim::LBFGS expected(plain->parameters(), options), optimizer(model->parameters(), options);
    const auto step = [](Layers& layers, optim::LBFGS& lbfgs) {
      const auto loss = lbfgs.step([&] {
        lbfgs.zero_grad();
        auto value = layers.loss(layers.input_of(0, 0));
        value.backward();
        return value;
      });
      return loss.item<double>();
    };
    EXPECT_EQ(step(*model, optimizer), step(*plain, expected));
    model->zero_grad();
    shard_case(*model, strategy);
    shard_optimizer(optimizer);
    EXPECT_NEAR(step(*model, optimizer), step(*plain, expected), 1e-5);
    EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
  }
}

TEST(Optimizers, ShardOptimizerRefusesAnUnknownClass) {
  struct Unknown : optim::Optimizer {
    using Optimizer::Optimizer;
    torch::Tensor step(LossClosure /*closure*/) override { return {}; }
  };
  auto model = make_case<Layers>();
  Unknown optimizer(model->parameters(), std::make_unique<optim::SGDOptions>(0.1));
  optimizer.state()[model->parameters()[0].unsafeGetTensorImpl()] = std::make_unique<optim::SGDParamState>();
  shard_case(*model, equivalence_strategies()[0]);
  EXPECT_THROWS_WITH(shard_optimizer(optimizer), "Unknown is not known: say what it keeps with tessera::register_optimizer");
}

} // namespace
} // namespace tessera::testing::optimizers_test
