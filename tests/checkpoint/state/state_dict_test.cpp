#include <gmock/gmock.h>
#include <tessera/checkpoint/state_dict.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::state_dict_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

std::vector<std::string> names(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& entry : state.entries()) names.push_back(entry.name);
  return names;
}

TEST(StateDict, KeepsOrderAndFindsByNameAndAlias) {
  StateDict state;
  const auto tensor = torch::rand({2});
  state.add("b", tensor, {"tied"});
  state.set("a", 3);
  state.set("f", 0.5);
  state.set("s", "text");
  state.set("on", true);
  EXPECT_THAT(names(state), ElementsAre("b", "a", "f", "s", "on"));
  EXPECT_TRUE(state.tensor("tied").is_same(tensor));
  EXPECT_EQ(state.value<int64_t>("a"), 3);
  EXPECT_EQ(state.value<double>("f"), 0.5);
  EXPECT_EQ(state.value<std::string>("s"), "text");
  EXPECT_TRUE(state.value<bool>("on"));
  state.set("a", size_t{4});
  EXPECT_EQ(state.value<int64_t>("a"), 4);
  state.erase("b");
  EXPECT_FALSE(state.contains("tied"));
  EXPECT_EQ(state.value<double>("f"), 0.5);
  EXPECT_THAT(names(state), ElementsAre("a", "f", "s", "on"));
}

TEST(StateDict, MisuseIsAnErrorThatNamesTheEntry) {
  StateDict state;
  state.add("t", torch::rand({1}), {"u"});
  state.set("v", 1);
  EXPECT_THAT(error_of([&] { state.add("u", torch::rand({1})); }), HasSubstr("\"u\" is taken"));
  EXPECT_THAT(error_of([&] { state.add("w", {}); }), HasSubstr("\"w\" is undefined"));
  EXPECT_EQ(error_of([&] { state.add("", torch::rand({1})); }), "state dict: an empty name");
  EXPECT_EQ(error_of([&] { state.add("__metadata__", torch::rand({1})); }),
            "state dict: the name \"__metadata__\" is reserved by the safetensors format");
  EXPECT_THAT(error_of([&] { state.set("t", 1); }), HasSubstr("\"t\" is a tensor"));
  EXPECT_THAT(error_of([&] { state.value<double>("v"); }), HasSubstr("\"v\" is of another type: it is {\"i64\":1}"));
  EXPECT_THAT(error_of([&] { state.tensor("v"); }), HasSubstr("\"v\" is a value"));
  EXPECT_THAT(error_of([&] { state.tensor("x"); }), HasSubstr("no entry \"x\""));
  EXPECT_THAT(error_of([&] { state.merge(state); }), HasSubstr("\"t\" is taken"));
}

TEST(StateDict, IsUnchangedAfterAnError) {
  StateDict state, other;
  state.add("t", torch::rand({1}), {"u"});
  EXPECT_THAT(error_of([&] { state.add("w", torch::rand({1}), {"x", "u"}); }), HasSubstr("\"u\" is taken"));
  EXPECT_THAT(error_of([&] { state.add("w", torch::rand({1}), {"x", "x"}); }), HasSubstr("\"x\" is taken"));
  EXPECT_THAT(error_of([&] { state.add("w", torch::rand({1}), {"w"}); }), HasSubstr("\"w\" is taken"));
  other.set("v", 1);
  other.add("x", torch::rand({1}), {"t"});
  EXPECT_THAT(error_of([&] { state.merge(other); }), HasSubstr("\"t\" is taken"));
  for (const auto* name : {"v", "w", "x"}) EXPECT_FALSE(state.contains(name)) << name;
  EXPECT_THAT(names(state), ElementsAre("t"));
  EXPECT_EQ(error_of([&] { state.set("w", 1); }), "no error");
  EXPECT_EQ(state.value<int64_t>("w"), 1);
}

TEST(StateDict, ErasesEntriesThatFulfilACondition) {
  StateDict state;
  const auto tensor = torch::rand({1});
  state.add("a", torch::rand({1}), {"b"});
  state.set("c", 3);
  state.add("d", tensor, {"e"});
  state.set("f", 6);
  state.erase_if([](const auto& entry) { return entry.name == "a" || entry.name == "c"; });
  EXPECT_THAT(names(state), ElementsAre("d", "f"));
  for (const auto* name : {"a", "b", "c"}) EXPECT_FALSE(state.contains(name)) << name;
  EXPECT_TRUE(state.tensor("e").is_same(tensor));
  EXPECT_EQ(state.value<int64_t>("f"), 6);
}

// A linear layer whose registered weight can be tied to another parameter.
struct TiedLinear : torch::nn::LinearImpl {
  TiedLinear(int64_t in, int64_t out) : LinearImpl(torch::nn::LinearOptions(in, out).bias(false)) {}
  void tie(const torch::Tensor& other) { parameters_["weight"] = weight = other; }
};

struct Model : torch::nn::Module {
  Model()
      : embed(register_module("embed", torch::nn::Embedding(5, 3))),
        head(register_module("head", std::make_shared<TiedLinear>(3, 5))),
        norm(register_module("norm", torch::nn::BatchNorm1d(5))) {}
  torch::nn::Embedding embed;
  std::shared_ptr<TiedLinear> head;
  torch::nn::BatchNorm1d norm;
};

TEST(ModuleState, HoldsParametersAndBuffersUnderFullNames) {
  const Model model;
  const auto state = state_dict(model);
  EXPECT_THAT(names(state), ElementsAre("embed.weight", "head.weight", "norm.weight", "norm.bias", "norm.running_mean",
                                        "norm.running_var", "norm.num_batches_tracked"));
  EXPECT_TRUE(state.tensor("norm.running_mean").is_same(model.norm->running_mean));
}

TEST(ModuleState, ATiedParameterIsOneEntryWithAnAlias) {
  Model model;
  model.head->tie(model.embed->weight);
  const auto state = state_dict(model);
  EXPECT_THAT(state.entries()[0].aliases, ElementsAre("head.weight"));
  EXPECT_EQ(state.size(), 6);
  EXPECT_TRUE(state.tensor("head.weight").is_same(model.embed->weight));
}

TEST(OptimizerState, HoldsOptionsAndStateByParameterName) {
  torch::nn::Linear model(3, 2);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.25).betas({0.5, 0.75}));
  const auto fresh = state_dict(*model, optimizer);
  EXPECT_EQ(fresh.value<std::string>("optimizer.type"), "AdamW");
  EXPECT_EQ(fresh.value<double>("optimizer.param_groups.0.lr"), 0.25);
  EXPECT_THAT(fresh.value<std::vector<double>>("optimizer.param_groups.0.betas"), ElementsAre(0.5, 0.75));
  EXPECT_THAT(fresh.value<std::vector<std::string>>("optimizer.param_groups.0.params"), ElementsAre("weight", "bias"));
  EXPECT_FALSE(fresh.contains("optimizer.state.weight.exp_avg"));

  model->forward(torch::rand({4, 3})).sum().backward();
  optimizer.step();
  const auto stepped = state_dict(*model, optimizer);
  EXPECT_EQ(stepped.value<int64_t>("optimizer.state.bias.step"), 1);
  EXPECT_EQ(stepped.tensor("optimizer.state.weight.exp_avg").sizes(), model->weight.sizes());
  EXPECT_FALSE(stepped.contains("optimizer.state.weight.max_exp_avg_sq"));
}

TEST(OptimizerState, AParameterOutsideTheModuleIsAnError) {
  torch::nn::Linear model(3, 2), other(4, 4);
  torch::optim::SGD optimizer({model->weight, other->weight}, 0.1);
  EXPECT_THAT(
      error_of([&] { state_dict(*model, optimizer); }),
      HasSubstr("parameter 1 of the optimizer's group 0, of shape [4, 4], is no parameter of the module; of an optimizer over "
                "several models, register these in one module"));
  torch::nn::Module both;
  both.register_module("model", model.ptr());
  both.register_module("other", other.ptr());
  EXPECT_TRUE(state_dict(both, optimizer).contains("optimizer.param_groups.0.lr"));
}

} // namespace
} // namespace tessera::state_dict_test
