// Base weights of others, adapters that are trained sharded, and their way to PEFT and back.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::lora_test {
namespace {

using testing::SharedFolder;
using testing::world_size;
using torch::Tensor;

// A linear layer with a frozen weight and an adapter, under the names that PEFT has.
struct LoraLinearImpl : torch::nn::Module {
  LoraLinearImpl(int64_t in, int64_t out) {
    weight = register_parameter("weight", torch::zeros({out, in}), /*requires_grad=*/false);
    lora_a = register_module("lora_A", torch::nn::Linear(torch::nn::LinearOptions(in, 2).bias(false)));
    lora_b = register_module("lora_B", torch::nn::Linear(torch::nn::LinearOptions(2, out).bias(false)));
    torch::nn::init::zeros_(lora_b->weight);
  }
  Tensor forward(const Tensor& x) { return torch::linear(x, weight) + lora_b(lora_a(x)); }

  Tensor weight;
  torch::nn::Linear lora_a{nullptr}, lora_b{nullptr};
};
TORCH_MODULE(LoraLinear);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("q_proj", LoraLinear(6, 8));
    second = register_module("v_proj", LoraLinear(8, 3));
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }

  LoraLinear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

Net make_net(uint64_t seed) {
  torch::manual_seed(seed);
  return {};
}

Net sharded(Net net) {
  const auto mesh = init_device_mesh(testing::test_device_type(), {world_size()});
  for (auto& module : {net->first, net->second}) fully_shard(module, mesh);
  fully_shard(net, mesh);
  return net;
}

bool is_adapter(const std::string& name) { return name.find(".lora_") != std::string::npos; }
bool is_base(const std::string& name) { return !is_adapter(name); }
std::string as_in_base(const std::string& name) { return "model." + name; }
std::string as_peft(const std::string& name) { return "base_model.model." + name; }

void load_base(const Net& net, const std::filesystem::path& path) {
  load(state_dict(*net), path, {.cast = true, .filter = is_base, .rename = as_in_base});
}

// All ranks have the whole batch, so that their mean gradient is that of one process.
std::vector<double> train(Net& net, int steps) {
  std::vector<Tensor> adapters;
  for (const auto& parameter : net->parameters()) {
    if (parameter.requires_grad()) adapters.push_back(parameter);
  }
  torch::optim::Adam optimizer(adapters, 0.05);
  std::vector<double> losses;
  torch::manual_seed(3);
  const auto device = net->first->weight.device();
  const auto x = torch::randn({5, 6}).to(device), y = torch::randn({5, 3}).to(device);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST(Lora, TrainsOnAFrozenBaseAndGoesToPeftAndBack) {
  const SharedFolder folder;
  const auto base = folder.path() / "base", adapter = folder.path() / "adapter";
  StateDict others; // as a Hugging Face folder has them
  torch::manual_seed(7);
  others.add("model.q_proj.weight", torch::randn({8, 6}).to(at::kBFloat16));
  others.add("model.v_proj.weight", torch::randn({3, 8}).to(at::kBFloat16));
  save_hugging_face(others, base);

  auto net = sharded(make_net(1)), plain = make_net(1);
  load_base(net, base);
  load_base(plain, base);
  const auto losses = train(net, 4), expected = train(plain, 4);
  for (size_t step = 0; step < losses.size(); ++step) EXPECT_NEAR(losses[step], expected[step], 1e-6) << step;
  EXPECT_LT(losses.back(), losses.front());
  EXPECT_TENSORS_EQUAL(DTensor(net->first->weight).full_tensor(), others.tensor("model.q_proj.weight").to(at::kFloat));

  save_hugging_face(state_dict(*net), adapter,
                    {.file_name = "adapter_model.safetensors", .filter = is_adapter, .rename = as_peft});
  std::vector<std::string> names;
  const auto exported = read_state_dict(adapter / "adapter_model.safetensors");
  for (const auto& entry : exported.entries()) names.push_back(entry.name);
  EXPECT_THAT(names,
              ::testing::UnorderedElementsAre("base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight",
                                              "base_model.model.v_proj.lora_A.weight", "base_model.model.v_proj.lora_B.weight"));

  auto again = sharded(make_net(2));
  load_base(again, base);
  load(state_dict(*again), adapter, {.filter = is_adapter, .rename = as_peft});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 6}, net->first->weight.device());
  EXPECT_TENSORS_EQUAL(again->forward(x), net->forward(x));
}

} // namespace
} // namespace tessera::checkpoint::lora_test
