// Optimizers of one's own, several of them, and LBFGS, in state dicts and checkpoints under every strategy.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/optim/shard_optimizer.h>

#include <tessera/tests/checkpoint/own_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::checkpoint::own_optimizers_test {
namespace {

namespace optim = torch::optim;
using ::testing::ElementsAre;
using testing::expect_same;
using testing::Lion;
using testing::LionOptions;
using testing::LionState;
using testing::make_training;
using testing::register_lion;
using testing::SharedFolder;

class OwnOptimizers : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    register_lion();
  }
  void TearDown() override { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
};

struct Case {
  std::string training, from, to;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto strategies = testing::strategies(process_context().world_size());
  for (const auto& training : testing::own_trainings()) {
    for (const auto& from : strategies) {
      for (const auto& to : strategies) all.push_back({training, from, to});
    }
  }
  return testing::sweep(all, 12, [](const Case& each) { return testing::are_default(each.from, each.to); });
}

TEST_F(OwnOptimizers, EveryStrategyLoadsIntoEveryOther) {
  const SharedFolder folder;
  for (const auto& [training, from, to] : cases()) {
    SCOPED_TRACE(c10::str(training, " from ", from, " to ", to));
    const auto path = folder.path() / c10::str(training, " from ", from, " to ", to);
    const auto saved = make_training(training, from, 1), loaded = make_training(training, to, 2),
               again = make_training(training, from, 3);
    for (int64_t step = 0; step < 2; ++step) saved->step(step);
    again->step(0); // state that the load replaces
    save(saved->state(), path);
    load(loaded->state(), path);
    load(again->state(), path);
    expect_same(loaded->state(), saved->state());
    expect_same(again->state(), saved->state());
    for (int64_t step = 2; step < 4; ++step) {
      const auto expected = saved->step(step);
      EXPECT_NEAR(loaded->step(step), expected, 1e-9);
      EXPECT_EQ(again->step(step), expected);
    }
  }
}

TEST_F(OwnOptimizers, StateDictsInMemoryGoOverIntoOthers) {
  for (const auto& [training, from, to] : cases()) {
    SCOPED_TRACE(c10::str(training, " from ", from, " to ", to));
    const auto saved = make_training(training, from, 1), loaded = make_training(training, to, 2);
    for (int64_t step = 0; step < 2; ++step) saved->step(step);
    const auto whole = saved->state({.full_state_dict = true, .flatten_optimizer_state_dict = true});
    auto target = loaded->state({});
    load_state_dict(target, whole);
    EXPECT_NEAR(loaded->step(2), saved->step(2), 1e-9);
  }
}

TEST_F(OwnOptimizers, StateFromBeforeShardingIsSharded) {
  for (const auto& strategy : testing::strategies(process_context().world_size())) {
    SCOPED_TRACE(strategy);
    testing::TrainedModel plain(1), model(1);
    Lion expected(testing::Training::parameters_of(plain), 0.01), lion(testing::Training::parameters_of(model), 0.01);
    for (int64_t step = 0; step < 2; ++step) {
      testing::train_step(plain, expected, "plain", step);
      testing::train_step(model, lion, "plain", step);
    }
    model.zero_grad();
    testing::shard(model, strategy);
    shard_optimizer(lion);
    for (int64_t step = 2; step < 4; ++step)
      EXPECT_NEAR(testing::train_step(model, lion, strategy, step), testing::train_step(plain, expected, "plain", step), 1e-9);
  }
}

torch::nn::Sequential two_layers() { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2)); }

void train(torch::nn::Sequential& model, optim::Optimizer& optimizer) {
  optimizer.step([&] {
    model->zero_grad();
    auto loss = model->forward(torch::ones({2, 4})).square().sum();
    loss.backward();
    return loss;
  });
}

std::vector<std::string> names_of(const StateDict& state, const std::string& beginning) {
  std::vector<std::string> names;
  for (const auto& entry : state.entries()) {
    if (entry.name.starts_with(beginning)) names.push_back(entry.name);
  }
  return names;
}

TEST_F(OwnOptimizers, EntriesAreUnderTheRegisteredNames) {
  auto model = two_layers();
  Lion lion(model->parameters(), 0.5);
  train(model, lion);
  const auto state = state_dict(*model, lion);
  EXPECT_EQ(state.value<std::string>("optimizer.type"), "Lion");
  EXPECT_EQ(state.value<int64_t>("optimizer.steps"), 1);
  EXPECT_EQ(state.value<double>("optimizer.param_groups.0.lr"), 0.5);
  EXPECT_THAT(state.value<std::vector<double>>("optimizer.param_groups.0.betas"), ElementsAre(0.9, 0.99));
  EXPECT_THAT(state.value<std::vector<double>>("optimizer.param_groups.0.weight_decay"), ElementsAre());
  EXPECT_THAT(names_of(state, "optimizer.state.1."),
              ElementsAre("optimizer.state.1.weight.exp_avg", "optimizer.state.1.bias.exp_avg"));
}

TEST_F(OwnOptimizers, SeveralHaveTheirNamesInOneStateDict) {
  auto model = two_layers(), other = two_layers();
  const auto all = model->parameters(), theirs = other->parameters();
  Lion lion({all[0], all[2]}, 0.5), fresh_lion({theirs[0], theirs[2]}, 0.25);
  optim::SGD sgd({all[1], all[3]}, optim::SGDOptions(0.125).momentum(0.5)), fresh_sgd({theirs[1], theirs[3]}, 0.25);
  train(model, lion);
  train(model, sgd);
  const auto state = state_dict(*model, {{"first", lion}, {"second", sgd}});
  EXPECT_EQ(state.value<std::string>("optimizer.first.type"), "Lion");
  EXPECT_EQ(state.value<std::string>("optimizer.second.type"), "SGD");
  EXPECT_EQ(state.value<double>("optimizer.second.param_groups.0.lr"), 0.125);
  EXPECT_THAT(names_of(state, "optimizer.second.state."),
              ElementsAre("optimizer.second.state.0.bias.momentum_buffer", "optimizer.second.state.1.bias.momentum_buffer"));
  load_state_dict(*other, {{"first", fresh_lion}, {"second", fresh_sgd}}, state);
  expect_same(state_dict(*other, {{"first", fresh_lion}, {"second", fresh_sgd}}), state);
  EXPECT_EQ(fresh_lion.steps, 1);
  EXPECT_THROWS_WITH(load_state_dict(*other, {{"first", fresh_lion}}, state),
                     "unexpected in the state dict:\n  optimizer.second.state.0.bias.momentum_buffer");
  EXPECT_THROWS_WITH(load_state_dict(*other, {{"first", fresh_sgd}, {"second", fresh_lion}}, state),
                     "the checkpoint holds the state of another optimizer than SGD: Lion");
}

TEST_F(OwnOptimizers, TwoOverOneParameterAreAnError) {
  auto model = two_layers();
  const auto all = model->parameters();
  Lion lion({all[0], all[1], all[3]});
  optim::SGD sgd({all[2], all[3]}, 0.1);
  EXPECT_THROWS_WITH(state_dict(*model, {{"a", lion}, {"b", sgd}}),
                     "the optimizers \"a\" and \"b\" both hold the parameter \"1.bias\": each would step it");
}

TEST_F(OwnOptimizers, NamesThatCannotTellThemApartAreErrors) {
  auto model = two_layers(), other = two_layers();
  Lion lion({model->parameters()[0]});
  optim::SGD sgd({model->parameters()[1]}, 0.1), others(other->parameters(), 0.1);
  EXPECT_THROWS_WITH(state_dict(*model, {{"a", lion}, {"a", sgd}}), "the name \"a\" of an optimizer is taken");
  EXPECT_THROWS_WITH(state_dict(*model, {{"state", lion}}), "the name \"state\" of an optimizer is taken");
  EXPECT_THROWS_WITH(state_dict(*model, {{"", lion}}), "an optimizer has the name \"\"; it must not be empty");
  EXPECT_THROWS_WITH(state_dict(*model, {{"a.b", lion}}), "an optimizer has the name \"a.b\"");
  auto state = state_dict(*model, lion, {.prefix = "model."});
  EXPECT_THROWS_WITH(state.merge(state_dict(*other, others, {.prefix = "other."})),
                     "a merge of two classes of optimizers: give each a name");
}

TEST_F(OwnOptimizers, AClassThatDerivesFromARegisteredOneCountsAsIt) {
  struct Derived : Lion {
    using Lion::Lion;
  };
  auto model = two_layers();
  Derived derived(model->parameters());
  train(model, derived);
  EXPECT_EQ(state_dict(*model, derived).value<std::string>("optimizer.type"), "Lion");
}

// What a compiler says of {"momentum", &LionState::momentum}.
template <typename State>
concept HasMomentum = requires {
  OptimizerField<State>("momentum", &State::momentum);
};
static_assert(!HasMomentum<LionState>);
static_assert(!std::is_constructible_v<OptimizerField<LionState>, std::string, decltype(&LionOptions::lr)>);

TEST_F(OwnOptimizers, ARegistrationThatContradictsItselfOrAnotherIsAnError) {
  struct Unregistered : Lion {
    using Lion::Lion;
  };
  using Fields = std::vector<OptimizerField<LionState>>;
  const auto add = [](const std::string& name, const Fields& state,
                      const std::vector<OptimizerField<LionOptions>>& options = {}) {
    register_optimizer<Unregistered, LionState, LionOptions>(name, state, options);
  };
  const OptimizerField<LionState> exp_avg("exp_avg", &LionState::exp_avg);
  EXPECT_THROWS_WITH((register_optimizer<Lion, LionState, LionOptions>("Again", {}, {})), "Lion is registered already, as Lion");
  EXPECT_THROWS_WITH(add("Lion", {exp_avg}), "the name Lion is taken by the class tessera::testing::Lion");
  EXPECT_THROWS_WITH(add("AdamW", {exp_avg}), "the name AdamW is taken by the class torch::optim::AdamW");
  EXPECT_THROWS_WITH(add("", {exp_avg}), "has an empty name");
  EXPECT_THROWS_WITH(add("Other", {exp_avg, exp_avg}), "register_optimizer of Other: the name \"exp_avg\" of a field is taken");
  EXPECT_THROWS_WITH(add("Other", {{"a.b", &LionState::exp_avg}}), "a field has the name \"a.b\"");
  EXPECT_THROWS_WITH(add("Other", {}, {{"params", &LionOptions::lr}}), "the name \"params\" of a field is taken");
}

/// Keeps state of another class than it is registered with.
struct Mistaken : Lion {
  using Lion::Lion;
};

TEST_F(OwnOptimizers, ObjectsOfAnotherClassThanRegisteredAreAnError) {
  static const bool once = [] {
    register_optimizer<Mistaken, optim::SGDParamState, LionOptions>("Mistaken", {{"m", &optim::SGDParamState::momentum_buffer}},
                                                                    {});
    return true;
  }();
  EXPECT_TRUE(once);
  auto model = two_layers();
  Mistaken optimizer(model->parameters());
  EXPECT_EQ(state_dict(*model, optimizer).value<std::string>("optimizer.type"), "Mistaken");
  train(model, optimizer);
  EXPECT_THROWS_WITH(state_dict(*model, optimizer),
                     "an optimizer keeps an object of class tessera::testing::LionState, and was registered "
                     "(tessera::register_optimizer) with the class torch::optim::SGDParamState");
}

enum class Mode { kSlow, kFast };

/// Every kind of field. It moves no parameter, and its state is what a test writes into it.
struct EverythingState : optim::OptimizerCloneableParamState<EverythingState> {
  std::vector<torch::Tensor> history;
  std::optional<torch::Tensor> rows;
  torch::Tensor step;
  Mode mode = Mode::kSlow;
  int8_t small = 0;
  struct {
    float inner = 0;
  } nested;
};
struct EverythingOptions : optim::OptimizerCloneableOptions<EverythingOptions> {
  std::array<float, 3> betas{0.1F, 0.2F, 0.3F};
  std::tuple<int, bool> pair{1, true};
  std::optional<std::string> rule;
  std::deque<int> milestones;
  std::vector<std::string> tags;
};
struct Everything : optim::Optimizer {
  explicit Everything(const std::vector<torch::Tensor>& parameters)
      : Optimizer(std::vector{optim::OptimizerParamGroup(parameters)}, std::make_unique<EverythingOptions>()) {}
  torch::Tensor step(LossClosure /*closure*/) override { return {}; }
  EverythingState& state_of(const torch::Tensor& parameter) {
    auto& kept = state()[parameter.unsafeGetTensorImpl()];
    if (!kept) kept = std::make_unique<EverythingState>();
    return static_cast<EverythingState&>(*kept);
  }
  EverythingOptions& options() { return static_cast<EverythingOptions&>(param_groups()[0].options()); }
};

void register_everything() {
  static const bool once = [] {
    using State = EverythingState;
    using Options = EverythingOptions;
    register_optimizer<Everything, State, Options>("Everything",
                                                   {{"history", &State::history},
                                                    {"rows", &State::rows, StateLayout::kReplicated},
                                                    {"step", &State::step, StateLayout::kPlain},
                                                    {"mode", &State::mode},
                                                    {"small", &State::small},
                                                    {"inner", [](State& state) -> auto& { return state.nested.inner;
  }
}
},
                                                   {{"betas", &Options::betas},
                                                    {"pair", &Options::pair},
                                                    {"rule", &Options::rule},
                                                    {"milestones", &Options::milestones},
                                                    {"tags", &Options::tags}});
return true;
}
();
(void)once;
}

struct EverythingTraining {
  explicit EverythingTraining(const std::string& strategy)
      : model(1), weight(model.embed->weight), optimizer(testing::Training::parameters_of(model)) {
    register_everything();
    testing::shard(model, strategy);
  }
  void fill(int64_t length) {
    const torch::NoGradGuard no_grad;
    auto& state = optimizer.state_of(weight);
    state.history.clear();
    for (int64_t i = 0; i < length; ++i) state.history.push_back(weight * static_cast<double>(i + 1));
    state.rows = is_dtensor(weight) ? DTensor(weight.mean(1)).redistribute(replicated()) : weight.mean(1);
    state.step = torch::full({}, 7, torch::kFloat);
    state.mode = Mode::kFast;
    state.small = -3;
    state.nested.inner = 0.1F;
    optimizer.options().pair = {5, false};
    optimizer.options().rule = "cosine";
    optimizer.options().milestones = {3, 5};
    optimizer.options().tags = {"a"};
  }
  Placements replicated() { return Placements(static_cast<size_t>(DTensor(weight).mesh().ndim()), Replicate{}); }
  StateDict state() { return state_dict(model, optimizer); }

  testing::TrainedModel model;
  torch::Tensor weight;
  Everything optimizer;
};

TEST_F(OwnOptimizers, EveryKindOfFieldComesBack) {
  const SharedFolder folder;
  for (const auto& strategy : testing::strategies(process_context().world_size())) {
    SCOPED_TRACE(strategy);
    EverythingTraining saved(strategy), loaded(strategy), other("plain");
    saved.fill(2);
    loaded.fill(3); // a longer list than the saved one
    loaded.optimizer.options().rule.reset();
    save(saved.state(), folder.path() / strategy);
    for (auto* each : {&loaded, &other}) {
      load(each->state(), folder.path() / strategy);
      expect_same(each->state(), saved.state());
      const auto& state = each->optimizer.state_of(each->weight);
      EXPECT_EQ(state.history.size(), 2);
      EXPECT_EQ(is_dtensor(*state.rows), is_dtensor(each->weight));
      EXPECT_FALSE(is_dtensor(state.step));
      EXPECT_EQ(state.step.item<float>(), 7);
      EXPECT_EQ(state.mode, Mode::kFast);
      EXPECT_EQ(state.small, -3);
      EXPECT_EQ(state.nested.inner, 0.1F);
      EXPECT_EQ(each->optimizer.options().betas, (std::array<float, 3>{0.1F, 0.2F, 0.3F}));
      EXPECT_EQ(each->optimizer.options().pair, (std::tuple<int, bool>{5, false}));
      EXPECT_EQ(each->optimizer.options().rule, "cosine");
      EXPECT_THAT(each->optimizer.options().milestones, ElementsAre(3, 5));
      EXPECT_EQ(each->optimizer.state().size(), 1);
    }
  }
}

TEST_F(OwnOptimizers, StateThatDoesNotLieAsRegisteredIsAnError) {
  EverythingTraining training("full-ragged");
  auto& state = training.optimizer.state_of(training.weight);
  training.fill(1);
  state.history = {torch::ones({3})};
  EXPECT_THROWS_WITH(training.state(), "optimizer.state.head.history.0 has shape [3], and its parameter [11, 7]: register it as");
  state.history = {torch::Tensor()};
  EXPECT_THROWS_WITH(training.state(), "optimizer.state.head.history.0 is undefined");
  state.history = {torch::ones({11, 7})};
  EXPECT_THROWS_WITH(training.state(), "optimizer.state.head.history.0 is a plain tensor and its parameter is sharded");
  training.fill(1);
  state.step = *state.rows;
  EXPECT_THROWS_WITH(training.state(), "optimizer.state.head.step is a DTensor, and was registered as StateLayout::kPlain");
}

TEST_F(OwnOptimizers, ValuesThatDoNotFitAreErrors) {
  EverythingTraining training("full-ragged");
  training.fill(1);
  const auto load_with = [&](const std::string& name, const StateValue& value) {
    auto source = state_dict(training.model, training.optimizer, {.cpu_offload = true});
    source.set(name, value);
    load_state_dict(training.model, training.optimizer, source);
  };
  EXPECT_THROWS_WITH(load_with("optimizer.state.head.small", int64_t{300}), "the number 300 does not fit the field's type");
  EXPECT_THROWS_WITH(load_with("optimizer.param_groups.0.pair", std::vector<int64_t>{1}), "a field of 2 values was saved with 1");
  EXPECT_THROWS_WITH(load_with("optimizer.param_groups.0.rule", std::vector<std::string>{"a", "b"}),
                     "a field that holds one value or none was saved with 2");
  EXPECT_THROWS_WITH(load_with("optimizer.param_groups.0.betas", true), "a value of another type");
}

TEST_F(OwnOptimizers, LbfgsOverParametersInAnotherOrderIsAnError) {
  auto model = two_layers();
  const auto all = model->parameters();
  optim::LBFGS optimizer(all, optim::LBFGSOptions(0.5).max_iter(2)), swapped({all[0], all[2], all[1], all[3]}),
      fewer({all[0], all[1]});
  train(model, optimizer);
  const auto state = state_dict(*model, optimizer, {.cpu_offload = true});
  EXPECT_THAT(state.value<std::vector<std::string>>("optimizer.parameters"),
              ElementsAre("0.weight", "0.bias", "1.weight", "1.bias"));
  EXPECT_THROWS_WITH(load_state_dict(*model, swapped, state),
                     "the checkpoint's LBFGS lists its parameters in another order than here: \"0.bias\" where \"1.weight\" is");
  EXPECT_THROWS_WITH(load_state_dict(*model, fewer, state), "the checkpoint's LBFGS has 4 parameters, and here are 2");
}

TEST_F(OwnOptimizers, AnUnregisteredClassIsAnErrorThatSaysWhatToDo) {
  struct Bare : optim::Optimizer {
    using Optimizer::Optimizer;
    torch::Tensor step(LossClosure /*closure*/) override { return {}; }
  };
  auto model = two_layers();
  Bare bare(model->parameters(), std::make_unique<LionOptions>());
  EXPECT_THROWS_WITH(state_dict(*model, bare), "Bare is not known: say what it keeps with tessera::register_optimizer");
}

} // namespace
} // namespace tessera::checkpoint::own_optimizers_test
