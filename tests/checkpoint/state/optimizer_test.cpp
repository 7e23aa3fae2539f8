// A run that is saved and resumed with a new model and a new optimizer goes on exactly as the uninterrupted one.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::optimizer_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

torch::nn::Sequential make_model(int64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 2));
}

double train_step(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, int64_t step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + step));
  const auto x = torch::randn({16, 4}, generator), y = torch::randn({16, 2}, generator);
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto each = torch::mse_loss(model->forward(x), y);
    each.backward();
    return each;
  });
  return loss.item<double>();
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup>)>;

template <typename Optimizer, typename Options>
MakeOptimizer with(const Options& options) {
  return [options](const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    return std::make_unique<Optimizer>(groups, options);
  };
}

std::map<std::string, MakeOptimizer> optimizers() {
  namespace optim = torch::optim;
  return {
      {"Adam", with<optim::Adam>(optim::AdamOptions(0.01).weight_decay(0.1))},
      {"AdamAmsgrad", with<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true))},
      {"AdamW", with<optim::AdamW>(optim::AdamWOptions(0.01))},
      {"AdamWAmsgrad", with<optim::AdamW>(optim::AdamWOptions(0.01).amsgrad(true))},
      {"SGD", with<optim::SGD>(optim::SGDOptions(0.01))},
      {"SGDMomentum", with<optim::SGD>(optim::SGDOptions(0.01).momentum(0.9).dampening(0.5))},
      {"RMSprop", with<optim::RMSprop>(optim::RMSpropOptions(0.01))},
      {"RMSpropCentered", with<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.9).centered(true))},
      {"Adagrad", with<optim::Adagrad>(optim::AdagradOptions(0.01).initial_accumulator_value(0.5))},
  };
}

class Resume : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<torch::optim::Optimizer> make(torch::nn::Sequential& model) {
    const auto parameters = model->parameters();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>(parameters.begin(), parameters.begin() + 2));
    groups.emplace_back(std::vector<torch::Tensor>(parameters.begin() + 2, parameters.end()));
    return optimizers().at(GetParam())(std::move(groups));
  }
};

TEST_P(Resume, GoesOnExactly) {
  const TemporaryFolder folder;
  for (const int64_t at : {0, 3}) {
    auto model = make_model(1), resumed = make_model(2);
    const auto optimizer = make(model), fresh = make(resumed);
    for (int64_t step = 0; step < at; ++step) train_step(model, *optimizer, step);
    optimizer->param_groups()[1].options().set_lr(0.003);
    const auto path = folder.path() / std::to_string(at);
    save(state_dict(*model, *optimizer), path);
    if (at == 0) train_step(resumed, *fresh, 0); // state that the checkpoint does not hold must go
    load(state_dict(*resumed, *fresh), path);
    EXPECT_EQ(fresh->param_groups()[1].options().get_lr(), 0.003);
    for (int64_t step = at; step < at + 4; ++step) {
      ASSERT_EQ(train_step(model, *optimizer, step), train_step(resumed, *fresh, step)) << "step " << step << " after " << at;
    }
  }
}

TEST(OptimizerCheckpoint, LbfgsGoesOnExactly) {
  const TemporaryFolder folder;
  for (const auto& search : {std::optional<std::string>(), std::optional<std::string>("strong_wolfe")}) {
    for (const int64_t at : {0, 1, 3}) {
      auto model = make_model(1), resumed = make_model(2);
      const auto options = torch::optim::LBFGSOptions(0.5).max_iter(3).history_size(4).line_search_fn(search);
      torch::optim::LBFGS optimizer(model->parameters(), options), fresh(resumed->parameters(), options);
      for (int64_t step = 0; step < at; ++step) train_step(model, optimizer, step);
      const auto path = folder.path() / c10::str(search.value_or("none"), at);
      save(state_dict(*model, optimizer), path);
      if (at != 1) train_step(resumed, fresh, 0);
      load(state_dict(*resumed, fresh), path);
      for (int64_t step = at; step < at + 3; ++step)
        ASSERT_EQ(train_step(model, optimizer, step), train_step(resumed, fresh, step)) << "step " << step << " after " << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllOptimizers, Resume,
                         ::testing::Values("Adam", "AdamAmsgrad", "AdamW", "AdamWAmsgrad", "SGD", "SGDMomentum", "RMSprop",
                                           "RMSpropCentered", "Adagrad"),
                         [](const auto& info) { return info.param; });

TEST(OptimizerCheckpoint, AParameterListedTwiceHasOneState) {
  const TemporaryFolder folder;
  const auto doubled = [](torch::nn::Sequential& model) {
    auto parameters = model->parameters();
    parameters.push_back(parameters[0]);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(parameters);
    groups.emplace_back(std::vector<torch::Tensor>{parameters[1]});
    return torch::optim::AdamW(groups, torch::optim::AdamWOptions(0.01));
  };
  auto model = make_model(1), resumed = make_model(2);
  auto optimizer = doubled(model), fresh = doubled(resumed);
  for (int64_t step = 0; step < 3; ++step) train_step(model, optimizer, step);
  save(state_dict(*model, optimizer), folder.path() / "saved");
  load(state_dict(*resumed, fresh), folder.path() / "saved");
  for (int64_t step = 3; step < 6; ++step) ASSERT_EQ(train_step(model, optimizer, step), train_step(resumed, fresh, step));
}

TEST(OptimizerCheckpoint, AnotherOptimizerIsAnError) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  torch::optim::AdamW adamw(model->parameters());
  torch::optim::Adam adam(model->parameters());
  save(state_dict(*model, adamw), folder.path() / "c");
  EXPECT_THAT(error_of([&] { load(state_dict(*model, adam), folder.path() / "c"); }),
              HasSubstr("the checkpoint holds the state of another optimizer than Adam: AdamW"));
}

TEST(OptimizerCheckpoint, OtherParameterGroupsAreAnError) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  const auto all = model->parameters();
  torch::optim::SGD one(all, 0.1), fewer({all[0], all[1]}, 0.1);
  torch::optim::SGD two({torch::optim::OptimizerParamGroup({all[0]}), torch::optim::OptimizerParamGroup({all[1]})}, 0.1);
  save(state_dict(*model, one), folder.path() / "one");
  save(state_dict(*model, two), folder.path() / "two");
  EXPECT_THAT(
      error_of([&] { load(state_dict(*model, fewer), folder.path() / "one"); }),
      HasSubstr(
          "parameter group 0 of the checkpoint's optimizer holds other parameters than here; 4 differ, the first is \"2.bias\""));
  EXPECT_THAT(error_of([&] { load(state_dict(*model, two), folder.path() / "one"); }),
              HasSubstr("an optimizer with 1 parameter groups, and here are 2; a state that was saved with "
                        "StateDictOptions::flatten_optimizer_state_dict fits other groups"));
  EXPECT_THAT(error_of([&] { load(state_dict(*model, one), folder.path() / "two"); }),
              HasSubstr("an optimizer with 2 parameter groups, and here are 1"));
}

// After a block that was frozen at the save has joined the optimizer.
TEST(OptimizerCheckpoint, AGroupThatWasAddedAfterTheSaveStaysAsItIs) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  const auto all = model->parameters();
  const auto make = [&](double lr) { return torch::optim::SGD({all[0], all[1]}, torch::optim::SGDOptions(lr).momentum(0.9)); };
  auto saved = make(0.5);
  for (const auto& parameter : all) parameter.mutable_grad() = torch::ones_like(parameter);
  saved.step();
  save(state_dict(*model, saved, {.flatten_optimizer_state_dict = true}), folder.path() / "flat");
  save(state_dict(*model, saved), folder.path() / "grouped");
  const auto add_group = [&](torch::optim::SGD& optimizer) {
    optimizer.add_param_group(
        {{all[2]}, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.25).momentum(0.9))});
  };
  auto grown = make(0.125);
  add_group(grown);
  load(state_dict(*model, grown), folder.path() / "flat", {.allow_missing = true});
  auto loaded_first = make(0.125);
  load(state_dict(*model, loaded_first), folder.path() / "grouped");
  add_group(loaded_first);
  for (auto* optimizer : {&grown, &loaded_first}) {
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.5);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.25);
    EXPECT_EQ(optimizer->state().size(), 2);
    optimizer->step();
    EXPECT_EQ(optimizer->state().size(), 3);
  }
}

// In the middle of an evaluation, for example.
TEST(OptimizerCheckpoint, StateThatIsMadeInInferenceModeTrains) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  torch::optim::Adam saved(model->parameters()), fresh(model->parameters()), in_memory(model->parameters());
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  saved.step();
  save(state_dict(*model, saved), folder.path() / "c");
  {
    const c10::InferenceMode inference;
    load(state_dict(*model, fresh), folder.path() / "c");
    load_state_dict(*model, in_memory, state_dict(*model, saved));
  }
  for (auto* optimizer : {&fresh, &in_memory}) {
    EXPECT_EQ(optimizer->state().size(), model->parameters().size());
    optimizer->step();
    EXPECT_EQ(state_dict(*model, *optimizer).value<int64_t>("optimizer.state.0.weight.step"), 2);
  }
}

TEST(OptimizerCheckpoint, WeightsAloneLoadFromATrainingCheckpoint) {
  const TemporaryFolder folder;
  auto model = make_model(1), other = make_model(2);
  torch::optim::AdamW optimizer(model->parameters());
  train_step(model, optimizer, 0);
  save(state_dict(*model, optimizer), folder.path() / "c");
  EXPECT_THAT(error_of([&] { load(state_dict(*other), folder.path() / "c"); }), HasSubstr("optimizer.state.0.bias.exp_avg"));
  LoadOptions options;
  options.allow_unused = true;
  load(state_dict(*other), folder.path() / "c", options);
  for (size_t i = 0; i < model->parameters().size(); ++i)
    EXPECT_TRUE(torch::equal(model->parameters()[i], other->parameters()[i]));
}

TEST(OptimizerCheckpoint, ACheckpointOfWeightsLeavesTheOptimizerAsItIs) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  torch::optim::AdamW optimizer(model->parameters());
  train_step(model, optimizer, 0);
  save(state_dict(*model), folder.path() / "c");
  EXPECT_THAT(error_of([&] { load(state_dict(*model, optimizer), folder.path() / "c"); }),
              HasSubstr("not in the checkpoint:\n  optimizer.type"));
  LoadOptions options;
  options.allow_missing = true;
  load(state_dict(*model, optimizer), folder.path() / "c", options);
  EXPECT_EQ(state_dict(*model, optimizer).value<int64_t>("optimizer.state.0.bias.step"), 1);
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& entry : state.entries()) names.push_back(entry.name);
  return names;
}

// A later save of the state would lack them, or hold others than the optimizer has.
TEST(OptimizerCheckpoint, ALoadThatFailsLeavesTheEntriesAsTheyAre) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  const auto make = [&](bool steps) {
    torch::optim::AdamW optimizer(model->parameters());
    if (steps) train_step(model, optimizer, 0);
    return optimizer;
  };
  for (const bool saves_moments : {true, false}) {
    for (const bool flattens : {false, true}) {
      SCOPED_TRACE(c10::str(saves_moments, flattens));
      const auto path = folder.path() / c10::str(saves_moments, flattens);
      auto saved = make(saves_moments), optimizer = make(!saves_moments);
      save(state_dict(*model, saved), path);
      auto state = state_dict(*model, optimizer, {.flatten_optimizer_state_dict = flattens});
      const auto before = names_of(state);
      state.add("lost", torch::zeros({1}));
      EXPECT_THAT(error_of([&] { load(state, path); }), HasSubstr("not in the checkpoint:\n  lost"));
      state.erase("lost");
      EXPECT_EQ(names_of(state), before);

      const auto file = path / "shard-00001-model-00001-of-00001.safetensors";
      auto bytes = testing::read_text(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      testing::write_text(file, bytes);
      EXPECT_THAT(error_of([&] { load(state, path); }), HasSubstr("is damaged"));
      EXPECT_EQ(names_of(state), before);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      testing::write_text(file, bytes);
      load(state, path);
      EXPECT_EQ(state.contains("optimizer.state.0.bias.exp_avg"), saves_moments);
      EXPECT_EQ(optimizer.state().empty(), !saves_moments);
    }
  }
}

// Not as it was when the state dict was made.
TEST(OptimizerCheckpoint, AnOptionThatTheCheckpointLacksStaysAsItIs) {
  const TemporaryFolder folder;
  auto model = make_model(1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto saved = state_dict(*model, optimizer);
  saved.erase("optimizer.param_groups.0.lr");
  save(saved, folder.path() / "c");
  auto state = state_dict(*model, optimizer);
  auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
  options.lr(0.5).momentum(0.8);
  const auto report = load(state, folder.path() / "c", {.allow_missing = true});
  EXPECT_THAT(report.missing, ::testing::ElementsAre("optimizer.param_groups.0.lr"));
  EXPECT_EQ(options.lr(), 0.5);
  EXPECT_EQ(options.momentum(), 0.9);
}

TEST(OptimizerCheckpoint, ANewStateHasTheDtypeOfItsParameters) {
  const TemporaryFolder folder;
  torch::nn::Linear model(4, 2), other(4, 2);
  model->to(at::kBFloat16);
  torch::optim::Adam optimizer(model->parameters()), fresh(other->parameters());
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  const auto saved = state_dict(*model, optimizer);
  save(saved, folder.path() / "c");
  EXPECT_THAT(error_of([&] { load(state_dict(*other, fresh), folder.path() / "c"); }),
              HasSubstr("optimizer.state.weight.exp_avg: saved as BFloat16[2, 4], to be loaded into Float[2, 4]"));
  load(state_dict(*other, fresh), folder.path() / "c", {.cast = true});
  const auto state = state_dict(*other, fresh);
  for (const auto* field : {"exp_avg", "exp_avg_sq"}) {
    const auto name = c10::str("optimizer.state.weight.", field);
    EXPECT_EQ(state.tensor(name).scalar_type(), at::kFloat);
    EXPECT_TENSORS_EQUAL(state.tensor(name), saved.tensor(name).to(at::kFloat));
  }
}

} // namespace
} // namespace tessera::checkpoint::optimizer_test
