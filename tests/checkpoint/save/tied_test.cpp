// A weight that modules of several groups share.
#include <tessera/tessera.h>

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::checkpoint::tied_test {
namespace {

using testing::SharedFolder;

struct LayerImpl : torch::nn::Module {
  LayerImpl() : bias(register_parameter("bias", torch::randn({5}))) { take(torch::randn({5, 7})); }
  void take(const torch::Tensor& shared) {
    weight = shared;
    if (named_parameters().contains("weight"))
      parameters_["weight"] = shared;
    else
      register_parameter("weight", shared);
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(torch::tanh(torch::linear(x, weight, bias)), weight); }
  torch::Tensor bias, weight;
};
TORCH_MODULE(Layer);

/// Two layers, each of which becomes a group, with one weight.
torch::nn::Sequential make_model(uint64_t seed) {
  torch::manual_seed(seed);
  Layer first, second;
  second->take(first->weight);
  return torch::nn::Sequential(first, second);
}

void shard(torch::nn::Sequential& model, const testing::Strategy& strategy) {
  const auto wrap = [&](torch::nn::Module& module) {
    if (strategy.replicates)
      replicate(module, strategy.mesh(), strategy.options);
    else
      fully_shard(module, strategy.mesh(), strategy.options);
  };
  for (const auto& layer : *model) wrap(*layer.ptr());
  wrap(*model);
}

TEST(TiedWeights, OfTwoGroupsAreSavedOnceAndLoadedIntoBoth) {
  for (const auto& saved : testing::sweep(testing::strategies(), 3, testing::is_default)) {
    for (const auto& loaded : testing::sweep(testing::strategies(), 2, testing::is_default)) {
      SCOPED_TRACE(saved.name + ", then " + loaded.name);
      const SharedFolder folder;
      auto plain = make_model(1);
      auto model = make_model(1), other = make_model(2);
      shard(model, saved);
      shard(other, loaded);
      auto state = state_dict(*model);
      std::vector<std::string> names;
      for (const auto& entry : state.entries()) names.push_back(entry.name);
      EXPECT_THAT(names, ::testing::UnorderedElementsAre("0.weight", "0.bias", "1.bias"));
      save(state, folder.path() / "saved");
      auto target = state_dict(*other);
      load(target, folder.path() / "saved");
      for (const auto& item : other->named_parameters())
        EXPECT_TENSORS_EQUAL(testing::full(item.value()), plain->named_parameters()[item.key()].detach());
      const auto x = torch::ones({2, 7}, testing::mesh_device_type);
      EXPECT_LT((testing::full(other->forward(x)) - plain->forward(torch::ones({2, 7}))).abs().max().item<double>(), 1e-5);
    }
  }
}

} // namespace
} // namespace tessera::checkpoint::tied_test
