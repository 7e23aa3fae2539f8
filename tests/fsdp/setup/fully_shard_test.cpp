#include <tessera/fsdp/fully_shard.h>

#include <gmock/gmock.h>

#include <functional>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::fully_shard_test {
namespace {

TEST(FullyShard, ParametersBecomeDTensorsOfTheLayoutsPlacement) {
  torch::manual_seed(0);
  torch::nn::Linear ragged(6, 5), per_parameter(6, 5);
  FullyShardOptions options;
  fully_shard(ragged, world_mesh(), options);
  options.layout = BufferLayout::kPerParameter;
  fully_shard(per_parameter, world_mesh(), options);
  EXPECT_TRUE(std::holds_alternative<RaggedShard>(DTensor(ragged->weight).placements()[0]));
  EXPECT_EQ(DTensor(per_parameter->weight).placements()[0], Placement(Shard{0}));
  EXPECT_EQ(ragged->weight.sizes(), (std::vector<int64_t>{5, 6}));
  EXPECT_TRUE(ragged->weight.requires_grad());
  EXPECT_TRUE(is_sharded(*ragged));
  EXPECT_EQ(fsdp(*ragged).parameter_names(), (std::vector<std::string>{"weight", "bias"}));
}

TEST(FullyShard, TheRootNamesTheParametersBelow) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  EXPECT_EQ(fsdp(*(*net->blocks)[1]).parameter_names(),
            (std::vector<std::string>{"blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.1.up.weight", "blocks.1.up.bias",
                                      "blocks.1.down.weight"}));
  EXPECT_EQ(fsdp(*net).parameter_names(), (std::vector<std::string>{"embed.weight", "norm.weight", "norm.bias"}));
}

TEST(FullyShard, SeveralModulesMakeOneGroup) {
  torch::manual_seed(0);
  auto a = torch::nn::Linear(4, 3), b = torch::nn::Linear(3, 2);
  const auto x = torch::ones({2, 4});
  const auto expected = b(a(x)).detach();
  const auto handle = fully_shard({a.ptr(), b.ptr()}, world_mesh());
  EXPECT_EQ(handle.parameter_names().size(), 4);
  process_context().reset_counters();
  EXPECT_TENSORS_CLOSE(b(a(x.to(test_device()))).detach(), expected);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, world_size() > 1 ? 1 : 0);
}

TEST(FullyShard, AListOfModulesIsNamedFromTheRoot) {
  torch::manual_seed(0);
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
  torch::nn::ModuleList inner, net, outer;
  inner->push_back(torch::nn::Linear(3, 3));
  net->push_back(torch::nn::Linear(4, 3));
  net->push_back(inner);
  net->push_back(torch::nn::Linear(3, 2));
  outer->push_back(net);
  const auto list = fully_shard(Modules{(*net)[0], (*net)[1]}, world_mesh());
  EXPECT_EQ(list.parameter_names(), (std::vector<std::string>{"0.weight", "0.bias", "1.0.weight", "1.0.bias"}));
  const auto above = fully_shard(Modules{net.ptr()}, world_mesh());
  EXPECT_EQ(list.parameter_names(), (std::vector<std::string>{"0.weight", "0.bias", "1.0.weight", "1.0.bias"}));
  EXPECT_EQ(above.parameter_names(), (std::vector<std::string>{"2.weight", "2.bias"}));
  fully_shard(outer, world_mesh());
  EXPECT_EQ(list.parameter_names()[2], "0.1.0.weight");
  EXPECT_EQ(above.parameter_names()[0], "0.2.weight");
  EXPECT_THROWS_WITH(fully_shard(net, world_mesh()), "is sharded already");
}

/// A layer, and the rest inside.
struct NestedImpl : torch::nn::Module {
  explicit NestedImpl(int64_t levels) {
    if (levels > 1) inner = register_module("inner", std::make_shared<NestedImpl>(levels - 1));
    layer = register_module("layer", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return inner ? inner->forward(layer(x).tanh()) : layer(x); }
  void shard(const DeviceMesh& mesh) {
    if (inner) inner->shard(mesh);
    fully_shard(*this, mesh);
  }
  std::shared_ptr<NestedImpl> inner;
  torch::nn::Linear layer{nullptr};
};

TEST(FullyShard, AParameterIsRedistributedInAnotherDtype) {
  torch::manual_seed(0);
  torch::nn::Linear layer(3, 5);
  const auto weight = layer->weight.detach().clone();
  fully_shard(layer, world_mesh());
  const torch::NoGradGuard no_grad;
  const auto moved = DTensor(layer->weight).redistribute({Replicate{}}, {.forward_dtype = torch::kBFloat16});
  EXPECT_TENSORS_EQUAL(moved.local(), weight.to(torch::kBFloat16));
}

TEST(FullyShard, ManyNestedLevelsTrain) {
  constexpr int kLevels = 300;
  torch::manual_seed(0);
  auto net = std::make_shared<NestedImpl>(kLevels);
  torch::manual_seed(0);
  auto plain = std::make_shared<NestedImpl>(kLevels);
  net->shard(world_mesh());
  const auto x = torch::ones({3, 2});
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    net->forward(x.to(test_device())).sum().backward();
  }
  plain->forward(x).sum().backward();
  EXPECT_TENSORS_CLOSE(full(net->layer->weight.grad()), plain->layer->weight.grad());
  auto deepest = net;
  std::string name;
  for (; deepest->inner; deepest = deepest->inner) name += "inner.";
  EXPECT_EQ(fsdp(*deepest).parameter_names()[0], name + "layer.weight");
}

TEST(FullyShard, OddParametersTrain) {
  struct OddImpl : torch::nn::Module {
    OddImpl() {
      scale = register_parameter("scale", torch::tensor(2.0));
      empty = register_parameter("empty", torch::empty({0, 3}));
      one = register_parameter("one", torch::ones({1}));
      counter = register_parameter("counter", torch::arange(3), /*requires_grad=*/false);
      frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
      half = register_parameter("half", torch::ones({3, 2}).to(torch::kBFloat16));
      wide = register_parameter("wide", torch::ones({1, 37}));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return (x * scale * frozen * counter).sum() * one.sum() + empty.sum() + half.to(torch::kFloat).sum() * 3 +
             wide.square().sum();
    }
    torch::Tensor scale, empty, one, counter, frozen, half, wide;
  };
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    auto plain = std::make_shared<OddImpl>(), net = std::make_shared<OddImpl>();
    FullyShardOptions options;
    options.layout = layout;
    fully_shard(*net, world_mesh(), options);
    const auto x = torch::arange(3, torch::kFloat), input = x.to(test_device());
    EXPECT_EQ(net->forward(input).item<float>(), plain->forward(x).item<float>());
    net->forward(input).backward();
    plain->forward(x).backward();
    for (const auto& item : plain->named_parameters()) {
      const auto got = net->named_parameters()[item.key()];
      EXPECT_TRUE(torch::equal(full(got), item.value())) << item.key();
      ASSERT_EQ(got.grad().defined(), item.value().grad().defined()) << item.key();
      if (got.grad().defined()) {
        EXPECT_TRUE(torch::equal(full(got.grad()), item.value().grad())) << item.key();
      }
    }
  }
}

TEST(FullyShard, CopyingAFullTensorKeepsThisRanksPart) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    torch::nn::Linear linear(6, 5);
    FullyShardOptions options;
    options.layout = layout;
    options.initial_weights = InitialWeights::kUnchecked;
    fully_shard(linear, world_mesh(), options);
    const auto values = torch::arange(30, torch::kFloat).view({5, 6});
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(values);
    EXPECT_TRUE(torch::equal(full(linear->weight), values));
    EXPECT_TENSORS_CLOSE(linear(torch::eye(6, test_device())) - linear(torch::zeros({1, 6}, test_device())), values.t());
  }
}

TEST(FullyShard, MetaModulesAreMaterializedShardByShard) {
  const auto init = [](torch::nn::Module& module) {
    if (auto* linear = module.as<torch::nn::Linear>()) linear->reset_parameters();
    if (auto* norm = module.as<torch::nn::LayerNorm>()) norm->reset_parameters();
    if (auto* embedding = module.as<torch::nn::Embedding>()) embedding->reset_parameters();
  };
  Net plain = make_net();
  torch::manual_seed(5);
  plain->apply(init);
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = on_meta([] { return Net(); });
    for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
    shard_model(net, strategy);
    EXPECT_NE(error_of([&] { net->forward(global_batch(0)); }).find("call tessera::materialize"), std::string::npos);
    torch::manual_seed(5);
    EXPECT_THAT(materialize(*net, init), ::testing::IsEmpty());
    EXPECT_EQ(parameter_difference(*net, *plain), 0);
    EXPECT_NEAR(loss_of(net, global_batch(0)).item<double>(), loss_of(plain, global_batch(0)).item<double>(), 1e-5);
  }
}

/// A rank names what it holds elements of.
std::set<std::string> names_of_all_ranks(const std::vector<std::string>& names) {
  const auto communicator = process_context().communicator(world_mesh().ranks(), torch::kCPU);
  std::set<std::string> all;
  for (const auto& text : internal::gather_texts(c10::Join(" ", names), *communicator, torch::kCPU, "names")) {
    std::istringstream words(text);
    all.insert(std::istream_iterator<std::string>(words), {});
  }
  return all;
}

TEST(FullyShard, MaterializeNamesWhatNothingInitialized) {
  const auto make = [] {
    auto model = torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 8));
    model[2]->as<torch::nn::Linear>()->weight.requires_grad_(false);
    return model;
  };
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto model = on_meta(make);
    if (strategy.replicates) {
      replicate(*model, strategy.mesh(), strategy.options);
    } else {
      fully_shard(*model, strategy.mesh(), strategy.options);
    }
    const auto unwritten = materialize(*model, [](torch::nn::Module& module) {
      if (auto* linear = module.as<torch::nn::Linear>()) torch::nn::init::ones_(linear->weight);
      if (auto* norm = module.as<torch::nn::BatchNorm1d>()) norm->running_mean.set_data(torch::zeros({8}));
    });
    EXPECT_THAT(names_of_all_ranks(unwritten),
                ::testing::ElementsAre("0.bias", "1.bias", "1.num_batches_tracked", "1.running_var", "1.weight", "2.bias"));
    EXPECT_THAT(materialize(*model, [](torch::nn::Module&) {}), ::testing::IsEmpty()); // nothing is on meta any more
  }
}

TEST(FullyShard, MaterializeOfAPartNamesTheRestOfItsGroup) {
  auto model = on_meta([] { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::Linear(3, 4)); });
  fully_shard(*model, world_mesh());
  const auto unwritten = materialize(*model[0], [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(1);
  });
  EXPECT_THAT(names_of_all_ranks(unwritten), ::testing::ElementsAre("1.bias", "1.weight"));
  EXPECT_THAT(materialize(*model[1], [](torch::nn::Module&) {}), ::testing::IsEmpty()); // it has memory already
}

TEST(FullyShard, DifferentInitialWeightsAreAnErrorOrBroadcast) {
  torch::manual_seed(static_cast<uint64_t>(world_rank()));
  torch::nn::Linear checked(3, 2), broadcast(3, 2);
  const auto message = error_of([&] { fully_shard(checked, world_mesh()); });
  if (world_size() > 1) {
    EXPECT_NE(message.find("the initial values of weight on rank(s) 1"), std::string::npos) << message;
  } else {
    EXPECT_EQ(message, "no error");
  }
  FullyShardOptions options;
  options.initial_weights = InitialWeights::kBroadcast;
  fully_shard(broadcast, world_mesh(), options);
  torch::manual_seed(0);
  torch::nn::Linear first(3, 2), second(3, 2);
  EXPECT_TRUE(torch::equal(full(broadcast->weight), second->weight));
}

TEST(FullyShard, BroadcastsOfInitialWeightsReachBuffers) {
  for (const int64_t replicas : {int64_t{1}, world_size()}) {
    const auto mesh = init_device_mesh(mesh_device_type, {replicas, world_size() / replicas}, {"replicate", "shard"});
    torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
    auto& norm = *net[1]->as<torch::nn::BatchNorm1d>();
    norm.running_mean.fill_(1 + static_cast<double>(world_rank()));
    norm.num_batches_tracked.fill_(world_rank());
    fully_shard(*net, mesh, {.initial_weights = InitialWeights::kBroadcast});
    EXPECT_TRUE(norm.running_mean.eq(1).all().item<bool>());
    EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 0);
  }
  if (world_size() == 1) return;
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::Functional(torch::relu));
  net->register_buffer("table", torch::ones(world_rank() == 1 ? 3 : 2));
  EXPECT_THROWS_WITH(fully_shard(*net, world_mesh(), {.initial_weights = InitialWeights::kBroadcast}),
                     "the buffer table Float[3]");
}

TEST(FullyShard, EveryDifferenceOfInitialWeightsIsAnError) {
  if (world_size() == 1) return;
  const std::vector<std::pair<std::string, std::function<void(torch::Tensor)>>> differences{
      {"constants", [](torch::Tensor weight) { weight.fill_(1 + static_cast<double>(world_rank())); }},
      {"signs", [](torch::Tensor weight) { weight.neg_(); }},
      {"the order of rows", [](torch::Tensor weight) { weight.copy_(weight.flip(0)); }},
      {"one element", [](torch::Tensor weight) { weight[1][1].add_(1e-6); }},
  };
  for (const auto& [what, change] : differences) {
    torch::manual_seed(0);
    torch::nn::Linear linear(4, 4);
    if (world_rank() == 1) {
      const torch::NoGradGuard no_grad;
      change(linear->weight);
    }
    const auto message = error_of([&] { fully_shard(linear, world_mesh()); });
    EXPECT_NE(message.find("the initial values of weight on rank(s) 1 differ"), std::string::npos) << what << ": " << message;
  }
}

TEST(FullyShard, FrozenParametersOfAnyDtypeAreCompared) {
  for (const auto dtype : {torch::kFloat8_e4m3fn, torch::kUInt16, torch::kBool, torch::kHalf, torch::kComplexFloat}) {
    torch::nn::Module module;
    module.register_parameter("values", torch::arange(6).to(dtype), /*requires_grad=*/false);
    EXPECT_EQ(error_of([&] { fully_shard(module, world_mesh()); }), "no error") << dtype;
  }
}

TEST(FullyShard, QuantizedParametersAreAnError) {
  torch::nn::Module module;
  module.register_parameter("values", torch::quantize_per_tensor(torch::ones({4}), 0.1, 0, torch::kQInt8), false);
  EXPECT_NE(error_of([&] { fully_shard(module, world_mesh()); }).find("the parameter values is quantized"), std::string::npos);
}

TEST(FullyShard, MemoryTiedAcrossGroupsIsAnError) {
  torch::manual_seed(0);
  torch::nn::Sequential tied(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  tied[1]->as<torch::nn::Linear>()->weight.set_data(tied[0]->as<torch::nn::Linear>()->weight.data());
  for (size_t i = 0; i < 2; ++i) fully_shard(*tied[i], world_mesh());
  EXPECT_NE(
      error_of([&] { fully_shard(tied, world_mesh()); }).find("the parameter 1.weight shares memory with the parameter 0.weight"),
      std::string::npos);
  torch::nn::Sequential copied(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  copied[1]->register_buffer("copy", copied[0]->as<torch::nn::Linear>()->weight.data());
  fully_shard(*copied[0], world_mesh());
  EXPECT_NE(
      error_of([&] { fully_shard(copied, world_mesh()); }).find("the buffer 1.copy shares memory with the parameter 0.weight"),
      std::string::npos);
}

TEST(FullyShard, ReshapingAShardedParameterInPlaceIsAnError) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    torch::manual_seed(0);
    torch::nn::Linear linear(3, 2);
    fully_shard(linear, world_mesh(), {.layout = layout});
    auto& weight = linear->weight;
    const std::vector<std::function<void()>> calls{
        [&] { weight.t_(); },       [&] { weight.transpose_(0, 1); }, [&] { weight.unsqueeze_(0); },
        [&] { weight.squeeze_(); }, [&] { weight.swapdims_(0, 1); },  [&] { weight.resize_({6}); },
        [&] { weight.data().t_(); }};
    for (const bool grad_mode : {false, true}) {
      const torch::AutoGradMode mode(grad_mode);
      for (const auto& call : calls) {
        const auto message = error_of(call);
        EXPECT_NE(message.find("weight"), std::string::npos) << message;
      }
    }
    EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{2, 3}));
    if (world_size() > 1) { // with one rank nothing sees what reads the unsharded parameter
      const torch::NoGradGuard no_grad;
      EXPECT_NE(error_of([&] { unsharded(weight).t_(); }).find("aten::t_ on the sharded parameter weight"), std::string::npos);
      EXPECT_EQ(unsharded(weight).t().t_().sizes(), (std::vector<int64_t>{2, 3})); // a view is the caller's own
    }
    const auto x = torch::ones({1, 3}, test_device());
    const auto before = linear(x).sum();
    EXPECT_NE(error_of(calls[0]), "no error");
    EXPECT_EQ(error_of([&] { before.backward(); }), "no error"); // nothing was written
    EXPECT_TENSORS_CLOSE(linear(x).detach(), (full(weight).sum(1) + full(linear->bias)).unsqueeze(0));
  }
}

TEST(FullyShard, ModelsOfSomeRanksDoNotConfuseThoseOfAll) {
  if (world_size() != 4) return;
  const auto grid = init_device_mesh(test_device_type(), {2, 2}, {"replicate", "shard"});
  const auto slice = grid["shard"];
  torch::manual_seed(0);
  torch::nn::Linear extra(3, 3);
  torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  if (world_rank() >= 2) fully_shard(extra, slice);
  fully_shard(*model[0], slice);
  fully_shard(model, world_mesh());
  EXPECT_NO_THROW(model->forward(torch::ones({2, 3}, test_device())).sum().backward());
}

TEST(FullyShard, DifferentModelsAreAnError) {
  torch::manual_seed(0);
  torch::nn::Linear linear(3, world_rank() == 0 ? 2 : 4);
  const auto message = error_of([&] { fully_shard(linear, world_mesh()); });
  if (world_size() > 1) {
    EXPECT_NE(message.find("the ranks' models or options differ: rank 0 has weight Float[2, 3], rank 1 has weight Float[4, 3]"),
              std::string::npos)
        << message;
  }
}

TEST(FullyShard, DifferentOptionsAreAnError) {
  if (world_size() == 1) return;
  const auto differing = [](const std::function<void(FullyShardOptions&)>& change) {
    torch::manual_seed(0);
    torch::nn::Linear linear(3, 2);
    FullyShardOptions options;
    if (world_rank() > 0) change(options);
    return error_of([&] { fully_shard(linear, world_mesh(), options); });
  };
  EXPECT_NE(differing([](auto& options) { options.layout = BufferLayout::kPerParameter; }).find("the layout kPerParameter"),
            std::string::npos);
  EXPECT_NE(differing([](auto& options) { options.reshard_after_forward = false; }).find("reshard_after_forward unset"),
            std::string::npos);
  EXPECT_NE(differing([](auto& options) { options.mixed_precision.reduce_dtype = torch::kDouble; }).find("reduce_dtype Double"),
            std::string::npos);
  torch::manual_seed(0);
  torch::nn::Linear linear(3, 2);
  const auto message =
      error_of([&] { world_rank() == 0 ? fully_shard(linear, world_mesh()) : replicate(*linear, world_mesh()); });
  EXPECT_NE(message.find("rank 0 has the strategy full over"), std::string::npos) << message;
  EXPECT_NE(differing([](auto& options) { options.initial_weights = InitialWeights::kUnchecked; }).find("initial_weights"),
            std::string::npos);
}

TEST(FullyShard, ErrorsOfStorageNameTheParameter) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2));
  fully_shard(*model[0], world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  fully_shard(model, world_mesh());
  const auto& weight = model[0]->as<torch::nn::Linear>()->weight;
  model->forward(torch::ones({1, 3}, test_device())).sum().backward();
  const torch::NoGradGuard no_grad;
  const std::vector<std::pair<torch::Tensor, std::string>> named{
      {weight, "of the parameter 0.weight"},
      {weight.detach(), "of the parameter 0.weight"},
      {weight.grad(), "of the gradient of 0.weight"},
      {weight.grad().detach(), "of the gradient of 0.weight"},
      {weight + 1, "of what was computed from the parameter 0.weight"},
      {weight.grad() * 2, "of what was computed from the gradient of 0.weight"}};
  for (const auto& entry : named) {
    const auto& tensor = entry.first;
    const auto error = "data pointer " + entry.second + " was asked for: a DTensor has no storage of its own";
    EXPECT_THROWS_WITH(tensor.data_ptr(), error);
    EXPECT_THROWS_WITH(tensor.const_data_ptr<float>(), error);
    EXPECT_THROWS_WITH((tensor.accessor<float, 2>()), "full_tensor() or tessera::unsharded() for the whole");
    EXPECT_THROWS_WITH(tensor.storage(), entry.second + " was asked for: a DTensor has no storage of its own");
  }
}

TEST(FullyShard, BroadcastsInAnotherOrderAreAnError) {
  if (world_size() == 1) return;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  const size_t first = world_rank() == 0 ? 0 : 1;
  FullyShardOptions options;
  options.initial_weights = InitialWeights::kBroadcast;
  fully_shard(*model[first], world_mesh(), options);
  fully_shard(*model[1 - first], world_mesh(), options);
  const auto message = error_of([&] { fully_shard(model, world_mesh(), options); });
  EXPECT_NE(message.find("rank 0 has the module 0 sharded, with values of checksum"), std::string::npos) << message;
}

/// Whatever the library did before the program asks: DTensors need it too, and what is on already cannot be told from that.
TEST(FullyShard, TheProgramsViewReplayStaysAsItIs) {
  auto& state = c10::AutogradState::get_tls_state();
  const bool before = state.get_view_replay_enabled();
  for (const bool enabled : {true, false}) {
    state.set_view_replay_enabled(false);
    auto net = make_net();
    shard_model(net, strategies()[0]);
    torch::optim::AdamW optimizer(net->parameters());
    const auto step = [&] {
      loss_of(net, global_batch(0)).backward();
      clip_grad_norm_(*net, 0.1);
      optimizer.step();
      optimizer.zero_grad();
    };
    const std::vector<std::function<void()>> befores{
        [] {},
        step,
        [&] { net->embed->weight.detach().clone(); },
        [&] {
          const torch::NoGradGuard no_grad;
          net->embed->weight.t().contiguous();
        },
        [&] { state_dict(*net); },
    };
    for (size_t i = 0; i < befores.size(); ++i) {
      state.set_view_replay_enabled(false);
      befores[i]();
      state.set_view_replay_enabled(enabled);
      loss_of(net, global_batch(1));
      EXPECT_EQ(state.get_view_replay_enabled(), enabled) << "after number " << i;
      step();
      EXPECT_EQ(state.get_view_replay_enabled(), enabled) << "a step after number " << i;
    }
  }
  state.set_view_replay_enabled(before);
}

TEST(FullyShard, BadInputNamesTheCause) {
  torch::manual_seed(0);
  const auto mesh = world_mesh();
  torch::nn::Linear linear(3, 2);
  fully_shard(linear, mesh);
  EXPECT_NE(error_of([&] { fully_shard(linear, mesh); }).find("the module torch::nn::LinearImpl is sharded already"),
            std::string::npos);
  EXPECT_NE(error_of([&] { linear->to(torch::kDouble); }).find("set_data on the sharded parameter weight would unshard it"),
            std::string::npos);
  torch::nn::Sequential parent(torch::nn::Linear(3, 2));
  fully_shard(parent, mesh, {.initial_weights = InitialWeights::kBroadcast});
  EXPECT_NE(error_of([&] { fully_shard(*parent[0], mesh); }).find("were sharded with a module above it: shard bottom-up"),
            std::string::npos);
  for (const auto dtype : {torch::kLong, torch::kBool, torch::kComplexFloat}) {
    FullyShardOptions options;
    options.mixed_precision.param_dtype = dtype;
    torch::nn::Linear cast(3, 2);
    EXPECT_NE(error_of([&] { fully_shard(cast, mesh, options); }).find("must be a floating-point dtype"), std::string::npos);
  }
  torch::nn::Module huge;
  huge.register_parameter("table", torch::empty({int64_t{1} << 59}, torch::kMeta));
  EXPECT_NE(error_of([&] { fully_shard(huge, mesh); }).find("with the parameter table of shape [576460752303423488]"),
            std::string::npos);
  torch::nn::ReLU empty;
  EXPECT_NE(error_of([&] { fully_shard(empty, mesh); }).find("has no parameter"), std::string::npos);
  torch::nn::Linear other(3, 2);
  EXPECT_NE(error_of([&] { fully_shard(other, DeviceMesh()); }).find("the mesh is undefined"), std::string::npos);
  const auto cube = init_device_mesh(test_device_type(), {1, 1, world_size()}, {"a", "b", "c"});
  EXPECT_NE(error_of([&] { fully_shard(other, cube); }).find("a 1-D mesh (shard) or a 2-D mesh"), std::string::npos);
  EXPECT_NE(error_of([&] { replicate(*other, cube); }).find("but the mesh has 3 dims"), std::string::npos);
  EXPECT_NE(error_of([&] { replicate(*other, cube); }).find("its flatten() has one"), std::string::npos);
  EXPECT_NE(error_of([&] { fsdp(*other); }).find("is not sharded: call fully_shard"), std::string::npos);
  EXPECT_FALSE(is_sharded(*other));
  other(torch::ones({1, 3})).sum().backward();
  EXPECT_NE(error_of([&] { fully_shard(other, mesh); }).find("weight has a gradient already"), std::string::npos);
}

} // namespace
} // namespace tessera::testing::fully_shard_test
