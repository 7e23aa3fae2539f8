// What is predicted of a model's memory, and what is said of its groups. tests/benchmarks compares the prediction with peaks.
#include <gmock/gmock.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/gather_extension.h>
#include <nlohmann/json.hpp>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::explain_test {
namespace {

using ::testing::HasSubstr;

int64_t parameter_bytes(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

TEST(Explain, SaysHowEachGroupLies) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    const auto whole = parameter_bytes(*net);
    shard_model(net, strategy);
    const auto explanation = explain(*net);
    EXPECT_EQ(explanation.rank, world_rank());
    int64_t parameters = 0, here = 0;
    for (const auto& group : explanation.groups) {
      parameters += group.parameters;
      here += group.shard_bytes;
      EXPECT_GE(group.padding_bytes, 0);
      EXPECT_EQ(group.reduce_bytes > 0, world_size() > 1);
      EXPECT_EQ(group.layout, strategy.options.layout == BufferLayout::kRagged ? "ragged" : "per-parameter");
    }
    EXPECT_EQ(parameters, static_cast<int64_t>(net->parameters().size()));
    EXPECT_LE(here, whole);
    if (strategy.replicates) EXPECT_EQ(here, whole);
  }
}

TEST(Explain, SaysWhatAnAllGatherSends) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    torch::nn::Linear linear(7, 5); // which 2, 3 and 4 ranks do not divide
    fully_shard(linear, world_mesh(), {.layout = layout, .initial_weights = InitialWeights::kBroadcast});
    process_context().reset_counters();
    fsdp(*linear).unshard();
    const auto group = explain(*linear).groups[0];
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).bytes, group.gather_bytes);
    EXPECT_EQ(group.gather_bytes > 0, world_size() > 1);
  }
}

TEST(Explain, CountsStatesAndBuffers) {
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::BatchNorm1d(64));
  const auto whole = parameter_bytes(*net);
  fully_shard(*net, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  const auto with = [&](ExplainOptions options) { return explain(*net, options).memory; };
  const auto adam = with({}), sgd = with({.optimizer_tensors = 0, .activation_bytes = 1000});
  EXPECT_EQ(adam.buffers, 2 * 64 * 4 + 8);
  EXPECT_NEAR(static_cast<double>(adam.parameters), static_cast<double>(whole) / world_size(), 0.02 * static_cast<double>(whole));
  EXPECT_NEAR(static_cast<double>(adam.optimizer_state), 2.0 * static_cast<double>(adam.parameters),
              0.02 * static_cast<double>(whole));
  EXPECT_EQ(sgd.optimizer_state, 0);
  EXPECT_LT(sgd.peak, adam.peak);
  EXPECT_EQ(adam.peak, adam.parameters + adam.buffers + adam.optimizer_state + adam.gradients + adam.unsharded +
                           adam.reduce_buffers + adam.cached + adam.activations + adam.temporaries);
}

TEST(Explain, CountsWhatIsFrozenAsParametersAlone) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
  for (auto& parameter : net->at<torch::nn::LinearImpl>(0).parameters()) parameter.requires_grad_(false);
  const auto ignored = net->at<torch::nn::LinearImpl>(1).bias; // trained, and whole on each rank
  FullyShardOptions options{.ignored_params = {ignored}};
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh(), options);
  fully_shard(*net, world_mesh(), options);
  const auto explanation = explain(*net, {.optimizer_tensors = 1});
  const int64_t trained = net->at<torch::nn::LinearImpl>(1).weight.nbytes() / world_size() + 64 * 4;
  EXPECT_NEAR(static_cast<double>(explanation.memory.optimizer_state), static_cast<double>(trained), 64);
  EXPECT_GE(explanation.memory.gradients, 64 * 4);
  EXPECT_LE(explanation.memory.gradients, trained + 256);
  EXPECT_EQ(explanation.groups[0].reduce_bytes, 0);
  for (auto& parameter : net->parameters()) parameter.requires_grad_(false); // later, too
  EXPECT_EQ(explain(*net).memory.optimizer_state + explain(*net).memory.gradients, 0);
}

TEST(Explain, CountsWhatNoGroupOfTheModelHas) {
  torch::manual_seed(0);
  const auto known = [](const torch::nn::Module& module) { return explain(module, {.optimizer_tensors = 3}).memory; };
  const auto sharded_list = [](const std::vector<torch::Tensor>& ignored) {
    torch::nn::ParameterList list;
    list->append(torch::ones({64, 64}).requires_grad_());
    for (const auto& each : ignored) list->append(each);
    fully_shard(*list, world_mesh(), {.ignored_params = ignored});
    return list;
  };
  const auto ignored = distribute_tensor(torch::ones({64, 64}, test_device()), world_mesh(), {Shard{0}}).requires_grad_();
  const int64_t local = internal::dtensor_meta(ignored)->local.nbytes();
  const auto without = known(*sharded_list({})), with = known(*sharded_list({ignored}));
  EXPECT_EQ(with.parameters - without.parameters, local);
  EXPECT_EQ(with.optimizer_state - without.optimizer_state, 3 * local);

  torch::nn::ModuleList model(torch::nn::Linear(8, 8));
  fully_shard(*model, world_mesh());
  const auto alone = known(*model);
  torch::nn::Linear other(64, 64); // another model
  fully_shard(*other, world_mesh());
  model->push_back(other);
  int64_t others = 0;
  for (const auto& parameter : other->parameters())
    others += static_cast<int64_t>(internal::dtensor_meta(parameter)->local.nbytes());
  EXPECT_EQ(known(*model).parameters - alone.parameters, others);
}

TEST(Explain, CountsASharedBufferOnce) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  const auto mask = torch::zeros({32}, test_device());
  for (int64_t i = 0; i < 3; ++i) net->ptr(i)->register_buffer("mask", i < 2 ? mask : mask.narrow(0, 0, 8));
  fully_shard(*net, world_mesh());
  EXPECT_EQ(explain(*net).memory.buffers, 32 * 4);
}

/// Sends a shard as it is.
struct Unchanged final : GatherExtension {
  Sent before(const torch::Tensor& shard, const DeviceMesh& /*mesh*/) override { return {{shard}}; }
  torch::Tensor after(const std::vector<std::vector<torch::Tensor>>& gathered, const std::any& /*metadata*/,
                      const torch::Tensor& /*out*/) override {
    std::vector<torch::Tensor> rows;
    for (const auto& rank : gathered) rows.push_back(rank[0]);
    return torch::cat(rows);
  }
};

TEST(Explain, CountsWhatAnExtendedGatherReceives) {
  torch::manual_seed(0);
  torch::nn::Linear linear(torch::nn::LinearOptions(64, 48).bias(false));
  linear->weight.requires_grad_(false); // so that the peak is in a gather
  const auto extend = [](const std::string&, const torch::Tensor&) { return std::make_shared<Unchanged>(); };
  fully_shard(linear, world_mesh(), {.gather_extension_fn = extend});
  const auto explanation = explain(*linear, {.optimizer_tensors = 0});
  const int64_t whole = 64 * 48 * 4;
  EXPECT_EQ(explanation.groups[0].unsharded_bytes, whole);
  EXPECT_EQ(explanation.memory.unsharded, 2 * whole) << "the parameter, and what all ranks have sent";
}

struct Layers {
  torch::nn::Sequential net;
  FSDPModule root;
};

/// Four, each a group with these options, and the root.
Layers four_layers(const FullyShardOptions& options = {}, bool trains = true) {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(64, 64));
  for (const auto& parameter : net->parameters()) parameter.requires_grad_(trains);
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh(), options);
  return {net, fully_shard(*net, world_mesh())};
}

TEST(Explain, KeepsFreedBlocksOnTheCpuAlone) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  const auto net = four_layers({}, /*trains=*/false).net;
  const auto explanation = explain(*net, {.activation_bytes = 1 << 30}); // so that the peak is where the forward ends
  EXPECT_EQ(explanation.memory.cached, tests_the_cpu() ? explanation.groups[0].unsharded_bytes : 0);
}

TEST(Explain, FollowsTheNumberOfReduceBuffers) {
  if (world_size() == 1) GTEST_SKIP() << "one rank reduces nothing";
  auto [net, root] = four_layers();
  const auto with_two = explain(*net, {.optimizer_tensors = 0}).memory;
  root.set_reduce_scatter_max_input_buffers(1);
  EXPECT_LT(explain(*net, {.optimizer_tensors = 0}).memory.peak, with_two.peak);
}

TEST(Explain, CountsWhatABackwardKeeps) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  auto [net, root] = four_layers();
  const auto freed = explain(*net);
  root.set_reshard_after_backward(false);
  const auto kept = explain(*net).memory;
  EXPECT_GE(kept.unsharded, 4 * freed.groups[0].unsharded_bytes);
  EXPECT_GT(kept.peak, freed.memory.peak);
}

/// Of what is trained: a frozen base in fp32 beside adapters in bf16, and a complex parameter.
TEST(Explain, CountsGradientsInTheDtypeOfTheirReduction) {
  if (world_size() == 1) GTEST_SKIP() << "one rank reduces nothing";
  const auto reduce_bytes = [](at::ScalarType base, at::ScalarType trained, std::optional<at::ScalarType> reduce_dtype) {
    torch::nn::ParameterList list;
    list->append(torch::ones({64}, base).set_requires_grad(false));
    list->append(torch::ones({64}, trained).set_requires_grad(true));
    FullyShardOptions options;
    options.mixed_precision.reduce_dtype = reduce_dtype;
    fully_shard(*list, world_mesh(), options);
    return explain(*list).groups[0].reduce_bytes;
  };
  const auto in_bf16 = reduce_bytes(torch::kFloat, torch::kBFloat16, {});
  EXPECT_LT(in_bf16, reduce_bytes(torch::kBFloat16, torch::kFloat, {}));
  EXPECT_GT(reduce_bytes(torch::kFloat, torch::kComplexFloat, torch::kFloat), reduce_bytes(torch::kFloat, torch::kFloat, {}));
}

TEST(Explain, FollowsTheLastForward) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(512, 512));
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh());
  fully_shard(*net, world_mesh());
  const auto all = explain(*net).memory;
  net->at<torch::nn::LinearImpl>(0).forward(torch::ones({1, 8}, test_device()));
  const auto first_layer = explain(*net).memory;
  EXPECT_EQ(first_layer.parameters, all.parameters);
  EXPECT_LT(first_layer.peak, all.peak);
}

TEST(Explain, CountsThePartsThatAForwardLeavesAmongNeighbours) {
  if (world_size() != 4) GTEST_SKIP() << "two neighbours among more ranks";
  const auto explain_layers = [](ReshardAfterForward left) {
    return explain(*four_layers({.reshard_after_forward = left}).net,
                   {.activation_bytes = 1 << 30}); // so that the peak is where the backward begins
  };
  const auto parts = explain_layers(2), shards = explain_layers(true);
  EXPECT_EQ(parts.memory.parameters - shards.memory.parameters, 3 * (parts.groups[0].unsharded_bytes / 2)) << "all but the last";
}

TEST(Explain, IsTextAndJson) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto explanation = explain(*net, {.activation_bytes = 12345});
  const auto json = nlohmann::json::parse(explanation.to_json());
  EXPECT_EQ(json["format"], "tessera explanation");
  EXPECT_EQ(json["groups"].size(), explanation.groups.size());
  EXPECT_EQ(json["memory"]["peak"], explanation.memory.peak);
  const auto text = explanation.to_string();
  for (const auto& group : explanation.groups) EXPECT_THAT(text, HasSubstr(group.name));
  EXPECT_THAT(text, HasSubstr(c10::str("at most ", explanation.memory.peak, " bytes at once, at: ", explanation.memory.peak_at)));
}

TEST(Explain, RefusesWhatItCannotExplain) {
  Net net = make_net();
  EXPECT_THROWS_WITH(explain(*net), "is not sharded: call fully_shard on it first");
  shard_model(net, strategies()[0]);
  EXPECT_THROWS_WITH(explain(*net, {.optimizer_tensors = -1}), c10::str("optimizer_tensors is -1"));
}

} // namespace
} // namespace tessera::testing::explain_test
