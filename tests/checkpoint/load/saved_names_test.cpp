// Parameters that have other names than in the checkpoint: what is named after them follows.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/torch_file.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::saved_names_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using testing::SharedFolder;
using Rename = std::function<std::string(const std::string&)>;

/// Two layers of one shape under these names, a head, an empty parameter, one of one element, and a tied one.
struct Net : torch::nn::Module {
  Net(const std::string& one, const std::string& two, uint64_t seed) {
    at::manual_seed(seed);
    first = register_module(one, torch::nn::Linear(5, 5));
    second = register_module(two, torch::nn::Linear(5, 5));
    head = register_module("head", torch::nn::Linear(5, 3));
    scale = register_parameter("scale", torch::ones({1}));
    none = register_parameter("none", torch::ones({0, 5}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(second(torch::tanh(first(x)))) * scale + none.sum(0)); }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  torch::Tensor scale, none;
};

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;

template <typename Optimizer, typename Options>
Make with(const Options& options) {
  return [options](const Groups& groups) { return std::make_unique<Optimizer>(groups, options); };
}

const Make kAdam = with<torch::optim::Adam>(torch::optim::AdamOptions(0.05).amsgrad(true));
const Make kMomentum = with<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));

/// A model and its optimizer, whose second group holds the second layer and has a learning rate of its own.
struct Trained {
  Trained(std::shared_ptr<Net> model, const std::string& strategy, const Make& make) : net(std::move(model)) {
    testing::shard(*net, {}, strategy);
    std::vector<at::Tensor> rest;
    const auto own = net->second->parameters();
    for (const auto& parameter : net->parameters()) {
      const auto is_it = [&](const at::Tensor& each) { return each.is_same(parameter); };
      if (std::ranges::none_of(own, is_it)) rest.push_back(parameter);
    }
    optimizer = make({torch::optim::OptimizerParamGroup(rest), torch::optim::OptimizerParamGroup(own)});
  }
  static Trained of(const std::string& one, const std::string& two, uint64_t seed, const std::string& strategy = "full-ragged",
                    const Make& make = kAdam) {
    return {std::make_shared<Net>(one, two, seed), strategy, make};
  }

  void step(int64_t number) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + number));
    const auto x = torch::randn({4, 5}, generator).to(testing::test_device_type());
    const auto closure = [&] {
      optimizer->zero_grad();
      auto loss = net->forward(x).square().sum();
      loss.backward();
      return loss;
    };
    optimizer->step(closure);
  }
  StateDict state(bool flattened = true) const {
    return state_dict(*net, *optimizer, {.flatten_optimizer_state_dict = flattened});
  }

  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

/// The weights in the order in which the model registers them.
void expect_same_weights(const Trained& actual, const Trained& expected) {
  const auto a = actual.net->parameters(), b = expected.net->parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TENSORS_EQUAL(testing::whole_tensor(a[i]), testing::whole_tensor(b[i]));
}

void expect_goes_on(Trained& actual, Trained& expected) {
  expect_same_weights(actual, expected);
  for (int64_t number = 3; number < 5; ++number) {
    actual.step(number);
    expected.step(number);
    expect_same_weights(actual, expected);
  }
}

Trained trained_for_3_steps(const std::string& one, const std::string& two, const std::string& strategy = "full-ragged",
                            const Make& make = kAdam) {
  auto trained = Trained::of(one, two, 1, strategy, make);
  for (int64_t number = 0; number < 3; ++number) trained.step(number);
  trained.optimizer->param_groups()[1].options().set_lr(0.0125);
  return trained;
}

/// The names of the layers here → in the checkpoint.
Rename layers(const std::map<std::string, std::string>& names) {
  return [names](const std::string& name) {
    const auto found = names.find(name.substr(0, name.find('.')));
    return found == names.end() ? name : found->second + name.substr(found->first.size());
  };
}

/// As programs write it that know of the optimizer's entries.
std::string anywhere(const std::string& name) {
  const auto at = name.find("dense.");
  return at == std::string::npos ? name : name.substr(0, at) + "fc." + name.substr(at + 6);
}

using Save = std::function<void(const StateDict&, const std::filesystem::path&)>;
const std::map<std::string, Save> kFormats{
    {"own", [](const StateDict& state, const std::filesystem::path& path) { save(state, path); }},
    {"pt", [](const StateDict& state, const std::filesystem::path& path) { save_torch(state, path); }},
};

TEST(RenamedParameters, TheirOptimizersStateFollowsInEveryFormat) {
  const SharedFolder folder;
  for (const auto& [format, save_in_format] : kFormats) {
    for (const auto& [class_name, make] : {std::pair("Adam", kAdam), {"momentum", kMomentum}}) {
      for (const bool flattened : {false, true}) {
        const auto path = folder.path() / c10::str(format, class_name, flattened);
        auto saved = trained_for_3_steps("fc", "second", "full-ragged", make);
        save_in_format(saved.state(flattened), path);
        for (const bool flattens : {false, true}) {
          for (const int64_t steps_before : {0, 1}) {
            SCOPED_TRACE(c10::str(path.filename().string(), " into ", flattens, " after ", steps_before));
            auto loaded = Trained::of("dense", "second", 2, "full-ragged", make);
            if (steps_before > 0) loaded.step(0);
            auto state = loaded.state(flattens);
            const auto report = load(state, path, {.rename = steps_before > 0 ? Rename(anywhere) : layers({{"dense", "fc"}})});
            EXPECT_THAT(report.missing, IsEmpty());
            EXPECT_THAT(report.unused, IsEmpty());
            EXPECT_FALSE(state.contains("optimizer.state.fc.weight.step"));
            if (!flattened)
              EXPECT_THAT(state.value<std::vector<std::string>>("optimizer.param_groups.0.params"), Contains("dense.weight"));
            auto going_on = Trained::of("fc", "second", 3, "full-ragged", make);
            load(going_on.state(flattened), path);
            EXPECT_EQ(loaded.optimizer->param_groups()[1].options().get_lr(), 0.0125);
            expect_goes_on(loaded, going_on);
          }
        }
      }
    }
  }
}

TEST(RenamedParameters, TheirOptimizersStateFollowsUnderEveryStrategy) {
  const SharedFolder folder;
  auto saved = trained_for_3_steps("fc", "second");
  save(saved.state(), folder.path() / "c");
  for (const auto& strategy : testing::strategies_and_layouts()) {
    SCOPED_TRACE(strategy);
    auto loaded = Trained::of("dense", "second", 2, strategy), expected = Trained::of("fc", "second", 3, strategy);
    load(loaded.state(), folder.path() / "c", {.rename = layers({{"dense", "fc"}})});
    load(expected.state(), folder.path() / "c");
    expect_goes_on(loaded, expected);
  }
}

// Saved by the first ranks, loaded by all.
TEST(RenamedParameters, TheirOptimizersStateFollowsToOtherNumbersOfRanks) {
  const SharedFolder folder;
  for (int64_t count = 1; count < testing::world_size(); ++count) {
    SCOPED_TRACE(count);
    std::vector<int64_t> ranks(static_cast<size_t>(count));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto mesh = make_device_mesh(testing::test_device_type(), {count}, ranks);
    const auto path = folder.path() / std::to_string(count);
    if (mesh.coordinate()) {
      auto net = std::make_shared<Net>("fc", "second", 1);
      fully_shard(*net, mesh);
      Trained saved(net, "plain", kAdam);
      for (int64_t number = 0; number < 3; ++number) saved.step(number);
      save(saved.state(), path, {.mesh = mesh});
    }
    SharedFolder::barrier();
    auto loaded = Trained::of("dense", "second", 2), expected = Trained::of("fc", "second", 3);
    load(loaded.state(), path, {.rename = layers({{"dense", "fc"}})});
    load(expected.state(), path);
    expect_goes_on(loaded, expected);
  }
}

TEST(RenamedParameters, SwappedLayersSwapTheirStates) {
  const SharedFolder folder;
  for (const bool flattened : {false, true}) {
    SCOPED_TRACE(flattened);
    const auto path = folder.path() / std::to_string(flattened);
    auto saved = trained_for_3_steps("a", "b");
    save(saved.state(flattened), path);
    auto loaded = Trained::of("b", "a", 2), expected = Trained::of("a", "b", 3);
    const auto report = load(loaded.state(), path, {.rename = layers({{"a", "b"}, {"b", "a"}})});
    EXPECT_THAT(report.missing, IsEmpty());
    load(expected.state(), path);
    expect_goes_on(loaded, expected);
  }
}

// The checkpoint has another layer under the name that the renamed one has here.
TEST(RenamedParameters, ANumberIsNotTakenForThatOfAGroup) {
  const SharedFolder folder;
  torch::nn::Module saved, numbered;
  const auto train = [](torch::nn::Module& module, const std::string& name, double rate) {
    const auto weight = module.register_parameter(name, torch::ones({3}));
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(rate).momentum(0.9));
    weight.sum().backward();
    optimizer.step();
    return optimizer;
  };
  auto before = train(saved, "w", 0.5), after = train(numbered, "0", 0.1);
  for (const bool flattened : {false, true}) {
    const auto state = [&](torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
      return state_dict(module, optimizer, StateDictOptions{.flatten_optimizer_state_dict = flattened});
    };
    const auto path = folder.path() / (flattened ? "flattened" : "by group");
    save(state(saved, before), path);
    const auto options = [&]() -> auto& { return static_cast<torch::optim::SGDOptions&>(after.param_groups()[0].options()); };
    options().lr(0.1);
    load(state(numbered, after), path, {.rename = [](const std::string&) { return "w"; }});
    EXPECT_EQ(options().lr(), 0.5);
    EXPECT_TRUE(torch::equal(numbered.parameters()[0], saved.parameters()[0]));
  }
}

TEST(RenamedParameters, AStateUnderTheNewNameIsNotTaken) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  auto saved = trained_for_3_steps("a", "b");
  save(saved.state(), path);
  struct OneLayer : torch::nn::Module {
    explicit OneLayer(const std::string& name) { layer = register_module(name, torch::nn::Linear(5, 5)); }
    torch::nn::Linear layer{nullptr};
  } net("b");
  testing::shard(net, {}, "full-ragged");
  torch::optim::Adam optimizer(net.parameters(), torch::optim::AdamOptions().amsgrad(true));
  const auto state = [&] { return state_dict(net, optimizer, {.flatten_optimizer_state_dict = true}); };
  const LoadOptions to_a{.rename = layers({{"b", "a"}})};
  EXPECT_THAT(error_of([&] { load(state(), path, to_a); }),
              AllOf(HasSubstr("the checkpoint holds more than the state"), HasSubstr("\n  b.weight"),
                    HasSubstr("\n  optimizer.param_groups.b.weight.lr\n")));
  auto allowing = to_a;
  allowing.allow_unused = true;
  const auto report = load(state(), path, allowing);
  EXPECT_THAT(report.missing, IsEmpty());
  EXPECT_THAT(report.unused,
              IsSupersetOf({"b.weight", "optimizer.state.b.weight.exp_avg", "optimizer.param_groups.b.weight.lr"}));
  EXPECT_THAT(report.unused, Not(Contains("optimizer.state.a.weight.exp_avg")));
  for (const auto* field : {"weight.exp_avg", "bias.max_exp_avg_sq"}) {
    EXPECT_TENSORS_EQUAL(testing::whole_tensor(state().tensor(c10::str("optimizer.state.b.", field))),
                         testing::whole_tensor(saved.state().tensor(c10::str("optimizer.state.a.", field))));
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
}

TEST(RenamedParameters, TwoOfOneGetAStateEach) {
  const SharedFolder folder;
  auto saved = trained_for_3_steps("a", "b");
  const auto path = folder.path() / "c";
  save(saved.state(), path);
  auto loaded = Trained::of("a", "twin", 2);
  loaded.optimizer->param_groups()[1].options().set_lr(0.05);
  const LoadOptions from_one{.allow_unused = true, .rename = layers({{"twin", "a"}})};
  EXPECT_THAT(load(loaded.state(), path, from_one).missing, IsEmpty());
  for (const auto* name : {"optimizer.state.a.weight.exp_avg", "optimizer.state.twin.weight.exp_avg"}) {
    EXPECT_TENSORS_EQUAL(testing::whole_tensor(loaded.state().tensor(name)),
                         testing::whole_tensor(saved.state().tensor("optimizer.state.a.weight.exp_avg")));
  }
  loaded.step(3); // into memory of their own
  EXPECT_FALSE(torch::equal(testing::whole_tensor(loaded.net->first->weight), testing::whole_tensor(loaded.net->second->weight)));
  // By group they are parameters of two groups, and the checkpoint has them in one.
  save(saved.state(/*flattened=*/false), folder.path() / "grouped");
  EXPECT_THAT(error_of([&] { load(loaded.state(), folder.path() / "grouped", from_one); }),
              HasSubstr("of the checkpoint's optimizer holds other parameters than here"));
}

TEST(RenamedParameters, SeveralOptimizersFollow) {
  const SharedFolder folder;
  for (const bool flattened : {false, true}) {
    SCOPED_TRACE(flattened);
    const auto path = folder.path() / std::to_string(flattened);
    const auto run = [&](const std::string& name, uint64_t seed, int64_t steps, const std::function<void(StateDict)>& use) {
      Net net(name, "second", seed);
      testing::shard(net, {}, "full-per-parameter");
      torch::optim::Adam adam(net.first->parameters(), 0.05);
      torch::optim::SGD sgd(net.second->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      for (int64_t number = 0; number < steps; ++number) {
        adam.zero_grad();
        sgd.zero_grad();
        net.forward(torch::ones({2, 5}, at::TensorOptions(testing::test_device_type()))).sum().backward();
        adam.step();
        sgd.step();
      }
      const auto state = [&] {
        return state_dict(net, {{"adam", adam}, {"sgd", sgd}}, {.flatten_optimizer_state_dict = flattened});
      };
      use(state());
      if (steps > 0) return;
      const auto loaded = state();
      EXPECT_EQ(loaded.value<int64_t>("optimizer.adam.state.dense.weight.step"), 3);
      EXPECT_EQ(loaded.value<int64_t>("optimizer.adam.state.dense.bias.step"), 3);
      EXPECT_TRUE(loaded.contains("optimizer.sgd.state.second.weight.momentum_buffer"));
    };
    run("fc", 1, 3, [&](const StateDict& state) { save(state, path); });
    run("dense", 2, 0, [&](StateDict state) {
      EXPECT_THAT(load(state, path, {.rename = layers({{"dense", "fc"}})}).missing, IsEmpty());
    });
  }
}

// The state of LBFGS is one vector over all parameters.
TEST(RenamedParameters, AnOrderOfParametersFollows) {
  const SharedFolder folder;
  const auto lbfgs = [](const Groups& groups) -> std::unique_ptr<torch::optim::Optimizer> {
    auto parameters = groups[0].params();
    parameters.insert(parameters.end(), groups[1].params().begin(), groups[1].params().end());
    return std::make_unique<torch::optim::LBFGS>(parameters, torch::optim::LBFGSOptions(0.1).max_iter(2));
  };
  const auto trained = [&](const std::string& one, const std::string& two, uint64_t seed) {
    Trained made(std::make_shared<Net>(one, two, seed), "full-ragged", lbfgs);
    return made;
  };
  auto saved = trained("fc", "second", 1);
  for (int64_t number = 0; number < 3; ++number) saved.step(number);
  for (const bool flattened : {false, true}) {
    SCOPED_TRACE(flattened);
    const auto path = folder.path() / std::to_string(flattened);
    save(saved.state(flattened), path);
    auto loaded = trained("dense", "second", 2), expected = trained("fc", "second", 3), twice = trained("fc", "twin", 3);
    EXPECT_THAT(load(loaded.state(), path, {.rename = layers({{"dense", "fc"}})}).missing, IsEmpty());
    load(expected.state(), path);
    expect_goes_on(loaded, expected);
    EXPECT_THAT(error_of([&] {
                  load(twice.state(), path, {.allow_missing = true, .allow_unused = true, .rename = layers({{"twin", "fc"}})});
                }),
                HasSubstr("the checkpoint's LBFGS lists its parameters in another order than here"));
  }
}

struct Tied : torch::nn::Module {
  Tied(const std::string& first_name, const std::string& second_name) {
    weight = register_parameter(first_name, torch::full({5, 3}, 0.5));
    if (!second_name.empty()) register_parameter(second_name, weight);
  }
  torch::Tensor weight;
};

TEST(RenamedParameters, ATiedOneFollowsByAnyOfItsNames) {
  const SharedFolder folder;
  const auto with_adam = [](Tied& net, const std::function<void(torch::optim::Adam&, StateDict)>& use) {
    testing::shard(net, {}, "full-ragged");
    torch::optim::Adam adam({net.weight}, 0.1);
    use(adam, state_dict(net, adam, {.flatten_optimizer_state_dict = true}));
  };
  Tied saved("a", "b");
  with_adam(saved, [&](torch::optim::Adam& adam, const StateDict&) {
    saved.weight.sum().backward();
    adam.step();
    save(state_dict(saved, adam, {.flatten_optimizer_state_dict = true}), folder.path() / "c");
  });
  struct Case {
    std::string first, second;
    Rename rename;
  };
  const auto swap = [](const std::string& name) { return name == "x" ? std::string("b") : name == "y" ? "a" : name; };
  for (const auto& each : std::vector<Case>{
           {"a", "b", nullptr}, {"b", "a", nullptr}, {"b", "", nullptr}, {"x", "y", swap}, {"y", "x", swap}, {"x", "", swap}}) {
    SCOPED_TRACE(each.first + each.second);
    Tied net(each.first, each.second);
    with_adam(net, [&](torch::optim::Adam& adam, StateDict state) {
      EXPECT_THAT(load(state, folder.path() / "c", {.rename = each.rename}).missing, IsEmpty());
      EXPECT_EQ(state_dict(net, adam).value<int64_t>("optimizer.state." + each.first + ".step"), 1);
    });
  }
}

TEST(RenamedParameters, AStateThatIsNotFoundIsReportedAndStays) {
  const SharedFolder folder;
  auto saved = trained_for_3_steps("fc", "second");
  for (const bool flattened : {false, true}) save(saved.state(flattened), folder.path() / std::to_string(flattened));
  auto loaded = Trained::of("dense", "second", 2);
  loaded.step(7);
  const auto before = testing::whole_tensor(loaded.state().tensor("optimizer.state.dense.weight.exp_avg")).clone();
  EXPECT_THAT(
      error_of([&] { load(loaded.state(), folder.path() / "1"); }),
      AllOf(HasSubstr("not in the checkpoint:"), HasSubstr("\n  optimizer.state.dense.weight.exp_avg\n"),
            HasSubstr("\n  optimizer.state.dense.weight.step\n"), HasSubstr("\n  optimizer.param_groups.dense.weight.lr\n"),
            HasSubstr("in the checkpoint, and not asked for:\n"),
            HasSubstr("LoadOptions::rename returns the name in the checkpoint for that of a tensor here; the state of an "
                      "optimizer follows its parameters")));
  EXPECT_THAT(
      error_of([&] { load(loaded.state(), folder.path() / "0"); }),
      HasSubstr("parameter group 0 of the checkpoint's optimizer holds other parameters than here; 4 differ, the first is "
                "\"dense.bias\", only the checkpoint has \"fc.bias\". Of a renamed parameter, LoadOptions::rename returns "
                "the name in the checkpoint; a state that was saved with"));
  const auto report = load(loaded.state(), folder.path() / "1", {.allow_missing = true, .allow_unused = true});
  EXPECT_THAT(report.missing, IsSupersetOf({"dense.weight", "optimizer.state.dense.weight.exp_avg",
                                            "optimizer.state.dense.weight.step", "optimizer.param_groups.dense.weight.lr"}));
  EXPECT_THAT(report.missing, Not(Contains("optimizer.state.second.weight.step")));
  const auto after = loaded.state();
  EXPECT_TENSORS_EQUAL(testing::whole_tensor(after.tensor("optimizer.state.dense.weight.exp_avg")), before);
  EXPECT_EQ(after.value<int64_t>("optimizer.state.dense.weight.step"), 1);
  EXPECT_EQ(after.value<int64_t>("optimizer.state.second.weight.step"), 3);
}

// As it was in the training that was saved: that is no loss.
TEST(RenamedParameters, AStateThatAKnownParameterDidNotHaveYetIsDropped) {
  const SharedFolder folder;
  auto saved = Trained::of("fc", "second", 1);
  for (const bool flattened : {false, true}) {
    SCOPED_TRACE(flattened);
    save(saved.state(flattened), folder.path() / std::to_string(flattened));
    auto loaded = Trained::of("dense", "second", 2);
    loaded.step(0);
    const LoadOptions renames{.rename = layers({{"dense", "fc"}})};
    EXPECT_THAT(load(loaded.state(), folder.path() / std::to_string(flattened), renames).missing, IsEmpty());
    EXPECT_TRUE(loaded.optimizer->state().empty());
  }
}

// Such a folder holds no values, so the optimizer's state must be there, and keeps its step.
TEST(RenamedParameters, TheTensorsOfAnOptimizerFollowInAHuggingFaceFolder) {
  const SharedFolder folder;
  auto saved = trained_for_3_steps("fc", "second");
  StateDict tensors;
  const auto all = saved.state();
  for (const auto& entry : all.entries()) {
    if (entry.is_tensor()) tensors.add(entry.name, std::get<at::Tensor>(entry.content));
  }
  save_hugging_face(tensors, folder.path() / "c");
  auto loaded = Trained::of("dense", "second", 2);
  loaded.step(0);
  const auto report = load(loaded.state(), folder.path() / "c", {.allow_missing = true, .rename = layers({{"dense", "fc"}})});
  EXPECT_THAT(report.missing, Contains("optimizer.type"));
  EXPECT_THAT(report.missing, Not(Contains("optimizer.state.dense.weight.exp_avg")));
  EXPECT_TENSORS_EQUAL(testing::whole_tensor(loaded.state().tensor("optimizer.state.dense.weight.exp_avg")),
                       testing::whole_tensor(saved.state().tensor("optimizer.state.fc.weight.exp_avg")));
}

// A function that knows the model's names alone.
TEST(RenamedParameters, OnlyTheNamesOfParametersAreAskedFor) {
  const SharedFolder folder;
  auto saved = trained_for_3_steps("fc", "second");
  save(saved.state(), folder.path() / "c");
  std::map<std::string, std::string> names;
  auto loaded = Trained::of("dense", "second", 2);
  for (const auto& parameter : loaded.net->named_parameters())
    names[parameter.key()] = layers({{"dense", "fc"}})(parameter.key());
  const auto report =
      load(loaded.state(), folder.path() / "c", {.rename = [&](const std::string& name) { return names.at(name); }});
  EXPECT_THAT(report.missing, IsEmpty());
  const auto is_of_model = [](const std::string& name) { return !name.starts_with("optimizer."); };
  EXPECT_THAT(load(loaded.state(), folder.path() / "c",
                   {.filter = is_of_model, .rename = [&](const std::string& name) { return names.at(name); }})
                  .missing,
              IsEmpty());
}

} // namespace
} // namespace tessera::checkpoint::saved_names_test
