// What each strategy keeps, and what it sends.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/layout/stages.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::strategies_test {
namespace {

/// Payload of a step's collectives, as the counters have it: the larger of input and output.
struct Payload {
  int64_t all_gather = 0, reduce_scatter = 0, all_reduce = 0;
  friend bool operator==(const Payload&, const Payload&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Payload& payload) {
    return out << "all-gather " << payload.all_gather << ", reduce-scatter " << payload.reduce_scatter << ", all-reduce "
               << payload.all_reduce;
  }
};

Payload sent() {
  auto& context = process_context();
  return {context.count(CollectiveKind::kAllGather).bytes, context.count(CollectiveKind::kReduceScatter).bytes,
          context.count(CollectiveKind::kAllReduce).bytes};
}

/// The formulas of docs/strategies.md, for a step with one backward. The root and the last block stay gathered from forward into
/// backward.
Payload expected_of(Net& net) {
  Payload payload;
  const auto groups = fsdp(*net).state()->subtree_groups(); // the root's first
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& group = *groups[i];
    const auto& stages = group.stages();
    const int64_t gathers = group.roles().keeps_parameters() ||
                                    group.options().reshard_after_forward == ReshardAfterForward(false) || i == 0 ||
                                    i + 1 == groups.size()
                                ? 1
                                : 2;
    const int64_t ranks = group.roles().shard_ranks();
    const int64_t gathered = ranks * group.layout().shard_bytes;
    const auto reduce = plan_reduce(group.layout(), std::vector<bool>(group.parameters().size(), true));
    const int64_t chunk = reduce.chunk_numel * static_cast<int64_t>(sizeof(float));
    if (stages.inner_gather().communicator) payload.all_gather += gathers * gathered;
    if (stages.innermost() > 0) payload.all_gather += stages.gathers[0].ranks() * group.layout().shard_bytes;
    int64_t left = ranks * chunk;
    for (const auto& stage : stages.reductions) {
      const bool scatters = stage.kind == internal::Stage::Kind::kReduceScatter;
      (scatters ? payload.reduce_scatter : payload.all_reduce) += left;
      if (scatters) left /= stage.ranks();
    }
  }
  return payload;
}

TEST(Strategies, SendWhatTheirFormulasSay) {
  for (const auto& strategy : strategies()) {
    if (strategy.name.starts_with("among neighbours")) continue; // whose second gather is of the padded storage
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Payload got;
    for (int64_t step = 0; step < 3; ++step) {
      process_context().reset_counters();
      optimizer.zero_grad();
      loss_of(net, own_batch(step)).backward();
      optimizer.step();
      got = sent();
    }
    EXPECT_EQ(got, expected_of(net));
  }
}

TEST(Strategies, KeepGatheredWhatTheTableKeepsWhole) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    loss_of(net, global_batch(0)).backward();
    const auto groups = fsdp(*net).state()->subtree_groups();
    const bool keeps = groups[0]->roles().keeps_parameters();
    for (const auto& group : groups) EXPECT_EQ(group->is_open(), keeps || !group->needs_gather());
    if (!keeps) continue;
    process_context().reset_counters();
    loss_of(net, global_batch(1)).backward();
    EXPECT_EQ(sent().all_gather, 0) << "no optimizer step has written the shards";
    torch::optim::SGD(net->parameters(), 0.1).step();
    for (const auto& group : groups) EXPECT_TRUE(group->is_stale());
  }
}

TEST(Strategies, WholeGradientsWaitForTheLastBackward) {
  if (world_size() == 1) return;
  for (const auto& row : kStrategies) {
    if (row.outer) continue;
    SCOPED_TRACE(row.name);
    Net net = make_net(), plain = make_net();
    shard_model(net, {std::string(row.name), world_mesh, {.strategy = row.strategy}});
    process_context().reset_counters();
    auto root = fsdp(*net);
    for (int64_t micro = 0; micro < 3; ++micro) {
      root.set_is_last_backward(micro == 2);
      loss_of(net, own_batch(micro)).backward();
      loss_of(plain, global_batch(micro)).backward();
    }
    const auto& context = process_context();
    const auto reductions = context.count(CollectiveKind::kReduceScatter).calls + context.count(CollectiveKind::kAllReduce).calls;
    EXPECT_EQ(reductions, (row.inner.gradients ? 3 : 1) * 4);
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6);
  }
}

TEST(Strategies, TrainInBFloat16AsFullShardingDoes) {
  const auto train = [](const Strategy& strategy) {
    auto how = strategy;
    how.options.mixed_precision.param_dtype = torch::kBFloat16;
    how.options.mixed_precision.reduce_dtype = torch::kFloat;
    Net net = make_net();
    shard_model(net, how);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(net, own_batch(step)).backward();
      optimizer.step();
    }
    return net;
  };
  const auto all = strategies();
  const Net reference = train(all[0]);
  const auto expected = reference->named_parameters();
  for (const auto& strategy : all) {
    SCOPED_TRACE(strategy.name);
    // A sum in another order may move a gradient over a rounding of bfloat16.
    for (const auto& item : train(strategy)->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value()), full(expected[item.key()]), 1e-3, 1e-3);
  }
}

torch::nn::Sequential six_layers() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) net->push_back(torch::nn::Linear(8, 8)); // 288 bytes each
  return net;
}

TEST(Strategies, WithoutShardingALargeModuleIsReducedInBuckets) {
  if (world_size() == 1) return;
  auto net = six_layers(), twin = six_layers();
  auto handle = replicate(*net, world_mesh(), {.bucket_bytes = 600});
  EXPECT_EQ(handle.parameter_names().size(), 12);
  EXPECT_EQ(handle.parameter_names()[11], "5.bias");
  const auto x = torch::ones({2, 8}), input = x.to(test_device());
  process_context().reset_counters();
  int64_t before_the_first = 0;
  const auto first = net[0]->as<torch::nn::Linear>()->forward(input);
  first.register_hook(
      [&](const torch::Tensor&) { before_the_first = process_context().count(CollectiveKind::kAllReduce).calls; });
  auto y = first;
  for (size_t i = 1; i < 6; ++i) y = net[i]->as<torch::nn::Linear>()->forward(y);
  y.sum().backward();
  EXPECT_EQ(before_the_first, 2) << "all but the first layers' bucket are on their way before its gradients come";
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, 3);
  net->zero_grad();
  handle.set_gradient_divide_factor(1); // of all its buckets
  net->forward(input).sum().backward();
  twin->forward(x).sum().backward();
  for (size_t i = 0; i < 12; ++i) {
    const auto expected = twin->parameters()[i].grad() * world_size();
    EXPECT_TENSORS_CLOSE(full(net->parameters()[i].grad()), expected, 1e-4, 1e-6);
  }
}

TEST(Strategies, TheBucketThatIsSentFirstMayBeSmaller) {
  auto net = six_layers(), twin = six_layers();
  const auto handle = replicate(*net, world_mesh(), {.bucket_bytes = 880, .first_bucket_bytes = 288});
  std::vector<size_t> parameters;
  for (const auto& group : handle.state()->groups()) parameters.push_back(group->parameters().size());
  EXPECT_EQ(parameters, world_size() == 1 ? (std::vector<size_t>{12}) : (std::vector<size_t>{4, 6, 2}));
  net->forward(torch::ones({2, 8}, test_device())).sum().backward();
  twin->forward(torch::ones({2, 8})).sum().backward();
  for (size_t i = 0; i < 12; ++i)
    EXPECT_TENSORS_CLOSE(full(net->parameters()[i].grad()), twin->parameters()[i].grad(), 1e-4, 1e-6);
  EXPECT_THROWS_WITH(replicate(*six_layers(), world_mesh(), {.first_bucket_bytes = 0}),
                     "fully_shard: first_bucket_bytes is 0, but must be positive");
}

void expect_gradients_of(torch::nn::Sequential& twin, torch::nn::Sequential& net) {
  for (size_t i = 0; i < 12; ++i) {
    const auto& gradient = net->parameters()[i].grad();
    const auto& expected = twin->parameters()[i].grad();
    ASSERT_EQ(gradient.defined(), expected.defined()) << i;
    if (expected.defined()) EXPECT_TENSORS_CLOSE(full(gradient), expected, 1e-4, 1e-6);
  }
}

/// The layers that a rank runs in one order or the other; none runs layer 3.
torch::Tensor run_some(torch::nn::Sequential& net, int64_t rank, int64_t round, torch::Tensor x) {
  for (int64_t step = 0; step < 6; ++step) {
    const int64_t layer = rank % 2 == 0 ? step : 5 - step;
    if (layer != 3 && (layer + rank + round) % 3 != 0) x = net[static_cast<size_t>(layer)]->as<torch::nn::Linear>()->forward(x);
  }
  return x.square().sum();
}

/// Steps of two backwards, the first of which may leave its gradients on the rank, or without the all-reduce.
TEST(Strategies, RanksMayUseDifferentBucketsInAnyOrder) {
  using Set = void (*)(FSDPModule&, bool);
  const std::vector<std::pair<const char*, Set>> settings{
      {"all synchronized", nullptr},
      {"requires_gradient_sync", [](FSDPModule& module, bool on) { module.set_requires_gradient_sync(on); }},
      {"requires_all_reduce", [](FSDPModule& module, bool on) { module.set_requires_all_reduce(on); }},
      {"is_last_backward", [](FSDPModule& module, bool on) { module.set_is_last_backward(on); }}};
  for (const auto& [name, set] : settings) {
    for (const int64_t bucket_bytes : {1, 300, 600}) {
      SCOPED_TRACE(c10::str(name, ", buckets of ", bucket_bytes));
      auto net = six_layers(), twin = six_layers();
      net[5]->as<torch::nn::Linear>()->weight.requires_grad_(false);
      twin[5]->as<torch::nn::Linear>()->weight.requires_grad_(false);
      auto handle = replicate(*net, world_mesh(), {.bucket_bytes = bucket_bytes});
      const auto x = torch::ones({2, 8}), input = x.to(test_device());
      for (int64_t step = 0; step < 2; ++step) {
        for (const int64_t round : {2 * step, 2 * step + 1}) {
          if (set) set(handle, round % 2 == 1);
          run_some(net, world_rank(), round, input).backward();
          for (int64_t rank = 0; rank < world_size(); ++rank) (run_some(twin, rank, round, x) / world_size()).backward();
        }
        expect_gradients_of(twin, net);
        if (step == 0) net->zero_grad();
        if (step == 0) twin->zero_grad();
      }
    }
  }
}

torch::Tensor run_path(torch::nn::Sequential& net, const std::vector<size_t>& path, torch::Tensor x) {
  for (const size_t layer : path) x = net[layer]->as<torch::nn::Linear>()->forward(x);
  return x.square().sum();
}

/// Layers of which some are sharded or replicated by a call of their own; all ranks run those that are sharded.
struct MixedModel {
  const char* name;
  void (*shard)(torch::nn::Sequential& net, const DeviceMesh& mesh);
  std::vector<size_t> even, odd; ///< the layers that ranks of even and odd number run
};

const FullyShardOptions kBucketALayer{.bucket_bytes = 300};

std::vector<MixedModel> mixed_models() {
  const auto shard = [](torch::nn::Sequential& net, const DeviceMesh& mesh) { fully_shard({net[1], net[2]}, mesh); };
  const auto shard_head = [](torch::nn::Sequential& net, const DeviceMesh& mesh) { fully_shard(*net[5], mesh); };
  const auto replicate_head = [](torch::nn::Sequential& net, const DeviceMesh& mesh) { replicate(*net[5], mesh); };
  const auto replicate_many = [](torch::nn::Sequential& net, const DeviceMesh& mesh) {
    auto options = kBucketALayer;
    options.strategy = tessera::Strategy::kNoShard;
    fully_shard({net[1], net[2], net[3]}, mesh, options);
  };
  return {{"read before what is sharded, or after", shard, {0, 1, 2, 5}, {1, 2, 5}},
          {"read between, from the first bucket or another", shard, {3, 1, 2, 0}, {3, 1, 2, 4, 0}},
          {"under a sharded head", shard_head, {0, 1, 5}, {0, 1, 4, 5}},
          {"under a replicated head", replicate_head, {0, 1, 5}, {0, 1, 4, 5}},
          {"around modules in buckets", replicate_many, {0, 1, 5}, {0, 1, 2, 5}}};
}

TEST(Strategies, RanksMayUseDifferentBucketsAroundOtherModules) {
  for (const auto& [name, shard, even, odd] : mixed_models()) {
    SCOPED_TRACE(name);
    auto net = six_layers(), twin = six_layers();
    shard(net, world_mesh());
    replicate(*net, world_mesh(), kBucketALayer);
    const auto path_of = [&, &even = even, &odd = odd](int64_t rank) { return rank % 2 == 0 ? even : odd; };
    const auto x = torch::ones({2, 8});
    for (int step = 0; step < 2; ++step) {
      run_path(net, path_of(world_rank()), x.to(test_device())).backward();
      for (int64_t rank = 0; rank < world_size(); ++rank) (run_path(twin, path_of(rank), x) / world_size()).backward();
    }
    expect_gradients_of(twin, net);
  }
}

struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, const torch::Tensor& scale) {
    context->save_for_backward({x});
    return x * unsharded(scale);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], (gradients[0] * context->get_saved_variables()[0]).sum(0)};
  }
};

/// A read within a function's forward foretells no gradient. That of the linear layer after it comes first.
TEST(Strategies, AGroupIsReducedOnceBesideAFunctionOfTheProgram) {
  torch::manual_seed(1);
  torch::nn::Linear linear(8, 8);
  linear->register_parameter("scale", torch::ones({8}));
  fully_shard(*linear, world_mesh());
  process_context().reset_counters();
  linear->forward(ScaleFunction::apply(torch::ones({2, 8}).to(test_device()), linear->named_parameters()["scale"]))
      .sum()
      .backward();
  EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, world_size() > 1 ? 1 : 0);
  for (const auto& parameter : linear->parameters()) EXPECT_TRUE(parameter.grad().defined());
}

TEST(Strategies, GathersAndReductionsMayShareACommunicator) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  torch::nn::Linear linear(5, 3);
  auto handle = fully_shard(*linear, world_mesh(),
                            {.initial_weights = InitialWeights::kBroadcast, .communicators = CommunicatorUse::kShared});
  const auto& counters = world_mesh().communicator(0, "fsdp")->counters();
  const auto gathers = counters.get(CollectiveKind::kAllGather).calls,
             reductions = counters.get(CollectiveKind::kReduceScatter).calls;
  linear->forward(torch::ones({2, 5}).to(test_device())).sum().backward();
  EXPECT_EQ(counters.get(CollectiveKind::kAllGather).calls, gathers + 1);
  EXPECT_EQ(counters.get(CollectiveKind::kReduceScatter).calls, reductions + 1);
  EXPECT_TENSORS_CLOSE(full(linear->bias.grad()), torch::full({3}, 2.0), 1e-6, 0);
}

/// The simulated device averages halves as NCCL does, which divides them first.
TEST(Strategies, AverageHalvesOnlyWhereEachOfTheirCommunicatorsDoes) {
  if (world_size() != 4) GTEST_SKIP() << "two replicas of two ranks";
  const std::vector<std::string> names{"replicate", "shard"};
  const internal::MeshRoles roles(init_device_mesh(test_device_type(), {2, 2}, names), tessera::Strategy::kHybridShard);
  auto stages = internal::connect_stages(roles, {}, CommunicatorUse::kSeparate);
  stages.reductions[0].communicator = init_device_mesh(torch::kCPU, {2, 2}, names).communicator(1);
  EXPECT_TRUE(stages.reductions[0].communicator->averages(torch::kHalf));
  EXPECT_EQ(stages.averages(torch::kHalf), stages.reductions[1].communicator->averages(torch::kHalf));
}

TEST(Strategies, TrainAsUnshardedOverSharedCommunicators) {
  for (auto strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    strategy.options.communicators = CommunicatorUse::kShared;
    auto plain = make_net(), sharded = make_net();
    shard_model(sharded, strategy);
    for (int64_t number = 0; number < 2; ++number) {
      const auto batch = global_batch(number);
      plain->zero_grad();
      sharded->zero_grad();
      loss_of(plain, batch).backward();
      loss_of(sharded, part_of(batch, world_rank(), world_size()).to(test_device())).backward();
      const auto expected = plain->named_parameters();
      for (const auto& item : sharded->named_parameters())
        EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6);
    }
  }
}

TEST(Strategies, HierarchicalShardsAreOfAllRanks) {
  if (world_size() != 4) GTEST_SKIP() << "2 x 2 ranks";
  torch::nn::Linear linear(8, 8);
  const FullyShardOptions options{.strategy = tessera::Strategy::kHierarchical,
                                  .layout = BufferLayout::kPerParameter,
                                  .initial_weights = InitialWeights::kBroadcast};
  const auto handle = fully_shard(linear, init_device_mesh(mesh_device_type, {2, 2}), options);
  EXPECT_EQ(handle.mesh().ranks(), (std::vector<int64_t>{0, 2, 1, 3})); // inner groups are 0, 1 and 2, 3
  EXPECT_EQ(DTensor(linear->weight).local().size(0), 2);
  EXPECT_TENSORS_EQUAL(full(linear->weight).narrow(0, 2 * handle.mesh().local_rank(), 2), DTensor(linear->weight).local());
}

TEST(Strategies, SayWhatIsWrong) {
  torch::nn::Linear linear(4, 4);
  const auto grid = init_device_mesh(mesh_device_type, {1, world_size()});
  const auto error = [&](const DeviceMesh& mesh, FullyShardOptions options) {
    options.initial_weights = InitialWeights::kUnchecked;
    return error_of([&] { fully_shard(linear, mesh, options); });
  };
  const auto contains = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  for (const auto& row : kStrategies) {
    const auto text = error(row.outer ? world_mesh() : grid, {.strategy = row.strategy});
    EXPECT_TRUE(contains(text, "the strategy " + std::string(row.name) + " takes a " + (row.outer ? "2" : "1") + "-D mesh"))
        << text;
  }
  EXPECT_TRUE(contains(error(world_mesh(), {.strategy = tessera::Strategy::kZero2, .reshard_after_forward = true}),
                       "the strategy zero-2 keeps the parameters gathered, but reshard_after_forward is true"));
  const auto five = error(world_mesh(), {.reshard_after_forward = 5});
  EXPECT_TRUE(contains(five, c10::str("reshard_after_forward of 5 ranks, but these must divide the ", world_size()))) << five;
  EXPECT_TRUE(contains(error(world_mesh(), {.reshard_after_forward = 0}), "reshard_after_forward of 0 ranks"));
  EXPECT_TRUE(contains(error_of([&] { replicate(linear, world_mesh(), {.strategy = tessera::Strategy::kFullShard}); }),
                       "replicate: the options ask for the strategy full"));
  EXPECT_TRUE(contains(error(world_mesh(), {.strategy = tessera::Strategy::kNoShard, .reshard_after_forward = 7}),
                       "the strategy no-shard shards nothing"));
  EXPECT_TRUE(contains(error(world_mesh(), {.bucket_bytes = 0}), "bucket_bytes is 0, but must be positive"));
  EXPECT_FALSE(is_sharded(*linear)) << "an error leaves the module as it was";
}

} // namespace
} // namespace tessera::testing::strategies_test
