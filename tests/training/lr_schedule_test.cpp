// Learning-rate schedules and their state in checkpoints.
#include <tessera/tessera.h>

#include <cmath>
#include <limits>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::lr_schedule_test {
namespace {

torch::optim::SGD sgd(double lr = 0.5) {
  return torch::optim::SGD({torch::zeros({2}).requires_grad_()}, torch::optim::SGDOptions(lr));
}

std::vector<double> curve(LRSchedule& schedule, int64_t steps) {
  std::vector<double> lrs{schedule.lrs()[0]};
  for (int64_t step = 0; step < steps; ++step) {
    schedule.step();
    lrs.push_back(schedule.lrs()[0]);
  }
  return lrs;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-15) << "step " << i;
}

// Of torch.optim.lr_scheduler, with lr = 0.5: [o.param_groups[0]["lr"]] + one after each of eight steps.
TEST(LRSchedule, FollowsPyTorchs) {
  auto a = sgd(), b = sgd(), c = sgd(), d = sgd();
  WarmupCosineLR cosine(a, {.total_steps = 8, .end_ratio = 0.1});
  expect_near(curve(cosine, 8), {0.5, 0.48287289481503953, 0.4340990257669732, 0.36110377228214524, 0.275, 0.18889622771785486,
                                 0.11590097423302685, 0.0671271051849605, 0.05}); // CosineAnnealingLR(T_max=8, eta_min=0.05)
  WarmupLinearLR growing(b, {.warmup_steps = 4, .total_steps = 4, .start_ratio = 0.25, .end_ratio = 1});
  expect_near(curve(growing, 8),
              {0.125, 0.21875, 0.3125, 0.40625, 0.5, 0.5, 0.5, 0.5, 0.5}); // LinearLR(start_factor=0.25, total_iters=4)
  WarmupLinearLR falling(c, {.total_steps = 5, .end_ratio = 0.2});
  expect_near(curve(falling, 8),
              {0.5, 0.42, 0.34, 0.26, 0.18, 0.1, 0.1, 0.1, 0.1}); // LinearLR(start_factor=1, end_factor=0.2, total_iters=5)
  // SequentialLR([LinearLR(start_factor=0.2, total_iters=3), CosineAnnealingLR(T_max=5, eta_min=0.05)], milestones=[3])
  WarmupCosineLR both(d, {.warmup_steps = 3, .total_steps = 8, .start_ratio = 0.2, .end_ratio = 0.1});
  expect_near(curve(both, 8), {0.1, 0.2333333333333333, 0.36666666666666664, 0.5, 0.45702882373436315, 0.34452882373436317,
                               0.20547117626563682, 0.09297117626563685, 0.05});
}

TEST(LRSchedule, FollowsTheFormulasOfWSDAndDeepSpeed) {
  const auto wsd = [](DecayShape decay) {
    auto optimizer = sgd(1);
    WSDLR schedule(optimizer, {.warmup_steps = 2, .stable_steps = 2, .decay_steps = 4, .end_ratio = 0.2, .decay = decay});
    return curve(schedule, 9);
  };
  const auto at = [](double fall) { return 0.2 + 0.8 * fall; };
  expect_near(wsd(DecayShape::kLinear), {0, 0.5, 1, 1, 1, at(0.75), at(0.5), at(0.25), 0.2, 0.2});
  const double half = std::sqrt(0.5);
  expect_near(wsd(DecayShape::kCosine), {0, 0.5, 1, 1, 1, at((1 + half) / 2), at(0.5), at((1 - half) / 2), 0.2, 0.2});
  expect_near(wsd(DecayShape::kOneMinusSqrt), {0, 0.5, 1, 1, 1, at(0.5), at(1 - half), at(1 - std::sqrt(0.75)), 0.2, 0.2});
  auto optimizer = sgd(1), logarithmic = sgd(1);
  WarmupDecayLR linear(optimizer, {.total_num_steps = 8,
                                   .warmup_min_lr = 0.1,
                                   .warmup_max_lr = 0.5,
                                   .warmup_num_steps = 4,
                                   .warmup_type = WarmupShape::kLinear});
  expect_near(curve(linear, 10), {0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1});
  WarmupDecayLR log(logarithmic, {.total_num_steps = 8, .warmup_max_lr = 1, .warmup_num_steps = 4});
  expect_near(curve(log, 6), {0, 0, 0.5, std::log(3) / std::log(4), 1, 1, 0.75});
}

TEST(LRSchedule, HasDeepSpeedsOthers) {
  auto a = sgd(0.5), b = sgd(0.5), c = sgd(0.5), d = sgd(1);
  WarmupLR own(a, {.warmup_min_lr = 0.1, .warmup_num_steps = 4, .warmup_type = WarmupShape::kLinear});
  expect_near(curve(own, 7), {0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5});
  EXPECT_EQ(own.rates(), LRSchedule::Rates::kOfBase);
  WarmupLR fixed(b, {.warmup_max_lr = 1, .warmup_num_steps = 1, .warmup_type = WarmupShape::kLinear});
  expect_near(curve(fixed, 4), {0, 0, 0.5, 1, 1}); // one step counts as two
  EXPECT_EQ(fixed.rates(), LRSchedule::Rates::kAbsolute);
  WarmupCosineRatioLR cosine(d, {.total_num_steps = 6,
                                 .warmup_min_ratio = 0.2,
                                 .warmup_num_steps = 2,
                                 .cos_min_ratio = 0.1,
                                 .warmup_type = WarmupShape::kLinear});
  const auto at = [](double part) { return 0.1 + 0.9 * (1 + std::cos(part * std::acos(-1))) / 2; };
  expect_near(curve(cosine, 8), {0, 0.2, 0.6, at(0.25), at(0.5), at(0.75), 0.1, 0.1, 0.1});
  EXPECT_THROWS_WITH(WarmupLR(c, {.warmup_num_steps = 0}), "WarmupLR: warmup_num_steps is 0, and must be at least 1");
  EXPECT_THROWS_WITH(WarmupCosineRatioLR(c, {.total_num_steps = 9}), "warmup_num_steps is 1000, more than total_num_steps, 9");
  EXPECT_THROWS_WITH(WarmupCosineRatioLR(c, {.total_num_steps = 9, .warmup_num_steps = 2, .cos_min_ratio = -1}),
                     "cos_min_ratio is -1");
}

// get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=2) of Hugging Face, with lr = 0.5
TEST(LRSchedule, EndsAtItsRatioRightAfterTheWarmup) {
  auto a = sgd(), b = sgd();
  WarmupLinearLR linear(a, {.warmup_steps = 2, .total_steps = 2});
  expect_near(curve(linear, 4), {0, 0.25, 0, 0, 0});
  WarmupCosineLR cosine(b, {.warmup_steps = 2, .total_steps = 2, .end_ratio = 0.5});
  expect_near(curve(cosine, 4), {0, 0.25, 0.25, 0.25, 0.25});
}

TEST(LRSchedule, SetsEachGroupsOwnRate) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : {0.5, 0.25, 0.0}) {
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1})}, std::make_unique<torch::optim::AdamWOptions>(lr));
  }
  torch::optim::AdamW optimizer(groups);
  WarmupLinearLR schedule(optimizer, {.warmup_steps = 2, .total_steps = 4});
  for (const double ratio : {0.0, 0.5, 1.0, 0.5, 0.0, 0.0}) {
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5 * ratio);
    EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.25 * ratio);
    EXPECT_EQ(optimizer.param_groups()[2].options().get_lr(), 0);
    schedule.step();
  }
}

TEST(LRSchedule, AfterAnAddedGroupANewOneGoesOn) {
  auto optimizer = sgd();
  const WarmupOptions options{.warmup_steps = 2, .total_steps = 10};
  WarmupLinearLR old(optimizer, options);
  for (int i = 0; i < 3; ++i) old.step();
  const auto next = optimizer.param_groups()[0].options().get_lr() * 6 / 7;
  optimizer.add_param_group({{torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(0.5)});
  EXPECT_THROWS_WITH(old.step(), "WarmupLinearLR: the optimizer has 2 parameter groups, and had 1 when the schedule was made");
  optimizer.param_groups()[0].options().set_lr(old.base_lrs()[0]);
  WarmupLinearLR schedule(optimizer, options);
  schedule.set_steps_taken(3);
  schedule.step();
  EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), next, 1e-12);
  EXPECT_NEAR(optimizer.param_groups()[1].options().get_lr(), 0.5 * 6 / 8, 1e-12);
}

TEST(LRSchedule, NamesWhatIsWrong) {
  auto optimizer = sgd();
  EXPECT_THROWS_WITH(WarmupCosineLR(optimizer, {}), "WarmupCosineLR: total_steps is 0, and must be at least 1");
  EXPECT_THROWS_WITH(WarmupLinearLR(optimizer, {.warmup_steps = 9, .total_steps = 8}),
                     "warmup_steps is 9, more than total_steps, 8");
  EXPECT_THROWS_WITH(WarmupLinearLR(optimizer, {.total_steps = 8, .end_ratio = -0.1}), "end_ratio is -0.1, and must be finite");
  EXPECT_THROWS_WITH(WSDLR(optimizer, {.stable_steps = 4}), "WSDLR: decay_steps is 0");
  EXPECT_THROWS_WITH(WarmupDecayLR(optimizer, {.total_num_steps = 10}),
                     "warmup_num_steps is 1000, more than total_num_steps, 10");
  WarmupCosineLR schedule(optimizer, {.warmup_steps = 2, .total_steps = 8});
  EXPECT_THROWS_WITH(WarmupCosineLR(optimizer, {.total_steps = 8}), "the optimizer's lr is 0 in every parameter group");
  WarmupDecayLR absolute(optimizer, {.total_num_steps = 8, .warmup_min_lr = 0.25, .warmup_num_steps = 4});
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25) << "the base does not count";
  EXPECT_THROWS_WITH(schedule.set_steps_taken(-1), "no schedule has taken -1 steps");
}

/// A run of a sharded model whose schedule, optimizer and step are saved and resumed.
struct Training {
  explicit Training(const WarmupOptions& options, double lr = 0.1)
      : optimizer(shard(net)->parameters(), lr), schedule(optimizer, options) {}
  static Net& shard(Net& net) {
    shard_model(net, strategies()[0]);
    return net;
  }
  void train(int64_t first, int64_t last) {
    for (auto step = first; step < last; ++step) {
      optimizer.zero_grad();
      loss_of(net, own_batch(step)).backward();
      optimizer.step();
      schedule.step();
    }
  }
  StateDict state(const ScheduleStateOptions& options = {}) {
    auto all = state_dict(*net, optimizer);
    all.merge(state_dict(schedule, options));
    return all;
  }
  Net net = make_net();
  torch::optim::AdamW optimizer;
  WarmupCosineLR schedule;
};

TEST(ScheduleState, IsSavedAndGoesOnToTheBit) {
  const SharedFolder folder;
  const WarmupOptions options{.warmup_steps = 3, .total_steps = 10, .end_ratio = 0.1};
  Training whole(options), first(options), second(options);
  whole.train(0, 8);
  first.train(0, 4);
  checkpoint::save(first.state(), folder.path() / "step-4");
  auto state = second.state();
  checkpoint::load(state, folder.path() / "step-4");
  EXPECT_EQ(second.schedule.steps_taken(), 4);
  EXPECT_EQ(second.optimizer.param_groups()[0].options().get_lr(), first.schedule.lrs()[0]);
  second.train(4, 8);
  EXPECT_EQ(second.schedule.lrs(), whole.schedule.lrs());
  const auto expected = whole.net->named_parameters();
  for (const auto& item : second.net->named_parameters()) EXPECT_TENSORS_EQUAL(full(item.value()), full(expected[item.key()]));

  Training in_memory(options);
  auto target = in_memory.state();
  load_state_dict(target, whole.state());
  EXPECT_EQ(in_memory.schedule.steps_taken(), 8);
}

TEST(ScheduleState, IsAnErrorWithOtherSettingsUnlessTheyAreWanted) {
  const SharedFolder folder;
  const WarmupOptions options{.warmup_steps = 3, .total_steps = 10}, longer{.warmup_steps = 3, .total_steps = 20};
  Training run(options), other(longer, 0.2);
  run.train(0, 4);
  checkpoint::save(run.state(), folder.path() / "a");
  const auto before = full(other.net->norm->weight).clone();
  auto state = other.state();
  const auto message = error_of([&] { checkpoint::load(state, folder.path() / "a"); });
  for (const auto* part :
       {"the learning-rate schedule \"lr_schedule\" was saved with other settings:",
        "\n  lr_schedule.base_lrs: saved [0.1], here [0.2]", "\n  lr_schedule.settings.total_steps: saved 10, here 20\n"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_NE(message.find(all_ranks() + ": the learning-rate"), std::string::npos) << message;
  EXPECT_EQ(message.find("warmup_steps"), std::string::npos) << message;
  EXPECT_EQ(other.schedule.steps_taken(), 0);
  EXPECT_TENSORS_EQUAL(full(other.net->norm->weight), before);

  auto accepted = other.state({.allow_other_settings = true});
  checkpoint::load(accepted, folder.path() / "a");
  EXPECT_EQ(other.schedule.steps_taken(), 4);
  auto reference = sgd(0.2);
  WarmupCosineLR expected(reference, longer);
  expected.set_steps_taken(4);
  EXPECT_EQ(other.optimizer.param_groups()[0].options().get_lr(), expected.lrs()[0]);

  auto optimizer = sgd(0.1);
  WSDLR another(optimizer, {.decay_steps = 4});
  auto target = state_dict(another);
  EXPECT_THROWS_WITH(checkpoint::load(target, folder.path() / "a", {.allow_unused = true}),
                     "lr_schedule.type: saved WarmupCosineLR, here WSDLR");
  auto changed = state_dict(another, {.allow_other_settings = true});
  checkpoint::load(changed, folder.path() / "a", {.allow_unused = true});
  EXPECT_EQ(another.steps_taken(), 4);
}

TEST(ScheduleState, WithOtherSettingsLoadsAgain) {
  const SharedFolder folder;
  auto a = sgd(0.1), b = sgd(0.2), c = sgd(0.3);
  WarmupCosineLR cosine(a, {.warmup_steps = 3, .total_steps = 10});
  WSDLR wsd(b, {.decay_steps = 4});
  cosine.set_steps_taken(4);
  wsd.set_steps_taken(5);
  checkpoint::save(state_dict(cosine), folder.path() / "cosine");
  checkpoint::save(state_dict(wsd), folder.path() / "wsd");
  WarmupLinearLR schedule(c, {.total_steps = 20});
  auto state = state_dict(schedule, {.allow_other_settings = true});
  for (const auto& [name, steps] :
       {std::pair("cosine", 4), std::pair("cosine", 4), std::pair("wsd", 5), std::pair("cosine", 4)}) {
    checkpoint::load(state, folder.path() / name);
    EXPECT_EQ(schedule.steps_taken(), steps) << name;
  }
}

TEST(ScheduleState, OfAbsoluteRatesGoesOnFromAnotherBase) {
  const SharedFolder folder;
  const WarmupDecayOptions options{.total_num_steps = 8, .warmup_max_lr = 0.5, .warmup_num_steps = 4};
  auto a = sgd(0.1), b = sgd(0.2);
  WarmupDecayLR first(a, options), second(b, options);
  first.set_steps_taken(5);
  checkpoint::save(state_dict(first), folder.path() / "a");
  auto state = state_dict(second);
  checkpoint::load(state, folder.path() / "a");
  EXPECT_EQ(second.steps_taken(), 5);
  EXPECT_EQ(b.param_groups()[0].options().get_lr(), a.param_groups()[0].options().get_lr());
}

TEST(ScheduleState, StaysWhereACheckpointIsWithoutIt) {
  const SharedFolder folder;
  StateDict saved;
  saved.set("step", 1);
  checkpoint::save(saved, folder.path() / "a");
  auto optimizer = sgd(0.1);
  WarmupCosineLR schedule(optimizer, {.warmup_steps = 3, .total_steps = 10});
  auto state = state_dict(schedule);
  for (int i = 0; i < 2; ++i) schedule.step(); // after the state dict was made
  checkpoint::load(state, folder.path() / "a", {.allow_missing = true, .allow_unused = true});
  EXPECT_EQ(schedule.steps_taken(), 2);
  schedule.step();
  load_state_dict(state, saved, {.strict = false});
  EXPECT_EQ(schedule.steps_taken(), 3);
}

TEST(ScheduleState, IsAnErrorWhereRanksHaveOtherSettings) {
  if (world_size() == 1) return;
  const SharedFolder folder;
  const bool odd = world_rank() == last_rank();
  Training run({.warmup_steps = 3, .total_steps = 10}), other({.warmup_steps = 3, .total_steps = odd ? 20 : 10});
  run.train(0, 4);
  checkpoint::save(run.state(), folder.path() / "a");
  auto state = other.state({.allow_other_settings = odd});
  const auto expect_error = [&](const std::string& error) {
    EXPECT_NE(error.find("cannot load \"lr_schedule.\", which differs between ranks:\nrank"), std::string::npos) << error;
    EXPECT_NE(error.find("settings.total_steps 20"), std::string::npos) << error;
  };
  expect_error(error_of([&] { checkpoint::load(state, folder.path() / "a"); }));
  auto in_memory = other.state({.allow_other_settings = odd});
  expect_error(error_of([&] { load_state_dict(in_memory, run.state()); }));
  EXPECT_EQ(other.schedule.steps_taken(), 0);
}

TEST(ScheduleState, WithASettingThatIsNoNumberGoesOn) {
  const SharedFolder folder;
  const auto make = [](torch::optim::Optimizer& optimizer) {
    return LRSchedule(optimizer, "Own", {{"unset", std::numeric_limits<double>::quiet_NaN()}},
                      [](double base, int64_t) { return base; });
  };
  Net net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto first = make(optimizer), second = make(optimizer);
  first.step();
  checkpoint::save(state_dict(first), folder.path() / "a");
  auto state = state_dict(second);
  checkpoint::load(state, folder.path() / "a");
  EXPECT_EQ(second.steps_taken(), 1);
}

TEST(ScheduleState, HoldsOnesOwnAndLibTorchsSchedules) {
  const SharedFolder folder;
  const auto inverse_root = [](torch::optim::Optimizer& optimizer, int64_t warmup) {
    return std::make_unique<LRSchedule>(
        optimizer, "InverseSqrt", LRSchedule::Settings{{"warmup", warmup}},
        [warmup](double base, int64_t step) { return base / std::sqrt(static_cast<double>(std::max(step, warmup))); });
  };
  Net net = make_net(), other = make_net();
  shard_model(net, strategies()[0]);
  shard_model(other, strategies()[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.5), of_other(other->parameters(), 0.5);
  torch::optim::StepLR steps(optimizer, 3, 0.5), of_other_steps(of_other, 3, 0.5);
  auto apart = sgd(), of_other_apart = sgd();
  const auto own = inverse_root(apart, 2), of_other_own = inverse_root(of_other_apart, 2);
  for (int i = 0; i < 5; ++i) {
    steps.step();
    own->step();
  }
  const auto state_of = [](Net& model, auto& sgd, auto& step_lr, auto& schedule) {
    auto state = state_dict(*model, sgd);
    state.merge(state_dict(step_lr, {.name = "steps"}));
    state.merge(state_dict(schedule, {.name = "own"}));
    return state;
  };
  checkpoint::save(state_of(net, optimizer, steps, *own), folder.path() / "a");
  auto state = state_of(other, of_other, of_other_steps, *of_other_own);
  checkpoint::load(state, folder.path() / "a");
  EXPECT_EQ(state.value<std::string>("steps.type"), "torch::optim::StepLR");
  EXPECT_EQ(of_other_own->steps_taken(), 5);
  EXPECT_EQ(of_other_own->lrs(), own->lrs());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(of_other.param_groups()[0].options().get_lr(), optimizer.param_groups()[0].options().get_lr());
    steps.step();
    of_other_steps.step();
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125);
}

} // namespace
} // namespace tessera::testing::lr_schedule_test
