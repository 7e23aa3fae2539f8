// Parameters of one call on several meshes: a mesh for each parameter from shard_placement_fn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reshard_parameters.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/column_experts.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::mesh_parts_test {
namespace {

using torch::Tensor;

/// A router that all share beside the weights of the experts in `held`.
struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(const std::vector<int64_t>& held) {
    register_experts(*this, held, 5);
    torch::manual_seed(1);
    stem = register_module("stem", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
  }
  Tensor forward(const Tensor& x, int64_t expert) {
    auto& chosen = *named_children()[expert_name(expert)]->as<torch::nn::Linear>();
    return norm(torch::tanh(chosen.forward(torch::tanh(stem(x)))));
  }
  torch::nn::Linear stem{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Mixture);

/// Experts on the mesh of their copies, norms whole, and the rest on the mesh of the call.
ShardPlacementFn by_name(const DeviceMesh& mesh) {
  return [mesh](const std::string& name, const Tensor&) -> ChosenPlacement {
    if (name.starts_with("expert")) return {std::nullopt, mesh["shard"]};
    return name.starts_with("norm") ? std::optional<Placement>(Replicate{}) : std::nullopt;
  };
}

struct Training {
  explicit Training(Mixture mixture) : model(std::move(mixture)) {}
  double step(const Tensor& loss) {
    optimizer.zero_grad();
    loss.backward();
    const auto norm = clip_grad_norm_(*model, 0.05).item<double>();
    optimizer.step();
    return norm;
  }
  StateDict state() { return state_dict(*model, optimizer, {.flatten_optimizer_state_dict = true}); }
  Mixture model;
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-2)};
};

/// With this rank's expert alone. All gradients are divided by all ranks.
Mixture sharded_mixture(const DeviceMesh& mesh, FullyShardOptions options) {
  Mixture mixture(std::vector<int64_t>{mesh.local_rank(1)});
  options.shard_placement_fn = by_name(mesh);
  fully_shard(*mixture, world_mesh(), options).set_gradient_divide_factor(static_cast<double>(world_size()));
  return mixture;
}

Tensor loss_of(Training& training, int64_t step, int64_t rank, const DeviceMesh& mesh) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  const auto rows = torch::randn({3, 6}, generator, torch::kFloat).to(training.model->stem->weight.device());
  return training.model->forward(rows, rank % mesh.size(1)).square().sum();
}

void step(Training& sharded, Training& plain, int64_t number, const DeviceMesh& mesh) {
  auto mean = torch::zeros({});
  for (int64_t rank = 0; rank < world_size(); ++rank) mean = mean + loss_of(plain, number, rank, mesh) / world_size();
  EXPECT_NEAR(sharded.step(loss_of(sharded, number, world_rank(), mesh)), plain.step(mean), 1e-4);
}

Mixture all_experts(const DeviceMesh& mesh) {
  std::vector<int64_t> all(static_cast<size_t>(mesh.size(1)));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  return Mixture(all);
}

std::vector<FullyShardOptions> all_options() {
  std::vector<FullyShardOptions> all(5);
  all[1].layout = BufferLayout::kPerParameter;
  all[2].strategy = tessera::Strategy::kZero1;
  all[3].strategy = tessera::Strategy::kNoShard;
  all[4].reshard_after_forward = false;
  return all;
}

TEST(MeshParts, TrainAsInTheUnshardedModelThroughACheckpoint) {
  const auto mesh = expert_grid();
  for (const auto& options : all_options()) {
    const SharedFolder folder;
    Training plain{all_experts(mesh)}, sharded{sharded_mixture(mesh, options)};
    for (int64_t number = 0; number < 3; ++number) step(sharded, plain, number, mesh);
    checkpoint::save(sharded.state(), folder.path() / "mixture");
    Training resumed{sharded_mixture(mesh, options)};
    checkpoint::load(resumed.state(), folder.path() / "mixture");
    for (int64_t number = 3; number < 5; ++number) step(resumed, plain, number, mesh);
    const auto expected = plain.model->named_parameters();
    for (const auto& item : resumed.model->named_parameters()) {
      SCOPED_TRACE(item.key());
      EXPECT_TENSORS_CLOSE(full(item.value()), expected[item.key()].detach(), 1e-4, 1e-5);
    }
  }
}

struct Unregistered : torch::nn::Module {
  static void parameter(torch::nn::Module& module, const std::string& name) {
    (module.*(&Unregistered::parameters_)).erase(name);
  }
};

torch::nn::LinearImpl& expert_of(Mixture& mixture, int64_t expert) {
  return *mixture->named_children()[expert_name(expert)]->as<torch::nn::Linear>();
}

void drop_bias(Mixture& mixture, int64_t expert) {
  auto& layer = expert_of(mixture, expert);
  layer.bias = Tensor();
  Unregistered::parameter(layer, "bias");
}

/// Another stem, which all ranks have.
void replace_stem(Mixture& mixture) {
  torch::manual_seed(7);
  mixture->stem = mixture->replace_module("stem", torch::nn::Linear(6, 6));
}

TEST(MeshParts, AreShardedAgainBesideWhatChanges) {
  const auto mesh = expert_grid();
  for (const auto& options : all_options()) {
    Training plain{all_experts(mesh)}, before{sharded_mixture(mesh, options)};
    step(before, plain, 0, mesh);
    before.model->zero_grad();
    replace_stem(before.model);
    replace_stem(plain.model);
    for (int64_t expert = 0; expert < mesh.size(1); ++expert) drop_bias(plain.model, expert);
    const auto own = mesh.local_rank(1);
    drop_bias(before.model, own);
    const auto changes = reshard_parameters(before.model);
    EXPECT_EQ(changes.added, (std::vector<std::string>{"stem.weight", "stem.bias"}));
    EXPECT_THAT(changes.removed, ::testing::UnorderedElementsAre("stem.weight", "stem.bias", expert_name(own) + ".bias"));
    Training sharded{before.model}, twin{plain.model};
    for (int64_t number = 1; number < 4; ++number) step(sharded, twin, number, mesh);
    for (const auto& item : sharded.model->named_parameters()) {
      SCOPED_TRACE(item.key());
      EXPECT_TENSORS_CLOSE(full(item.value()), twin.model->named_parameters()[item.key()].detach(), 1e-4, 1e-5);
    }
  }
}

/// Ranks of other experts would go on, and wait for those that have thrown.
TEST(MeshParts, OfWhichTheRanksHaveLostOthersAreAnErrorOnAllRanks) {
  const auto mesh = expert_grid();
  if (mesh.size(0) == 1) return; // where no two ranks have the same expert
  auto mixture = sharded_mixture(mesh, {});
  Unregistered::parameter(expert_of(mixture, mesh.local_rank(1)), world_rank() == 0 ? "bias" : "weight");
  EXPECT_THROWS_WITH(reshard_parameters(mixture), "the ranks' models or options differ: rank 0 has ");
}

TEST(MeshParts, NewOnesOfOneRankAloneAreAnErrorOnAllRanks) {
  if (world_size() == 1) return;
  const auto mesh = expert_grid();
  auto mixture = sharded_mixture(mesh, {});
  if (world_rank() == 0) expert_of(mixture, mesh.local_rank(1)).register_parameter("scale", torch::ones({5}));
  EXPECT_THROWS_WITH(reshard_parameters(mixture), "the ranks' models or options differ: rank 0 has ");
}

TEST(MeshParts, OfOneCallAreGatheredTogether) {
  const auto mesh = expert_grid();
  Mixture mixture(std::vector<int64_t>{mesh.local_rank(1)});
  fully_shard(*mixture, world_mesh(), {.shard_placement_fn = by_name(mesh)});
  const auto& expert = *mixture->named_children()[expert_name(mesh.local_rank(1))]->as<torch::nn::Linear>();
  EXPECT_EQ(DTensor(expert.weight).mesh(), mesh["shard"]);
  EXPECT_EQ(DTensor(mixture->stem->weight).mesh(), world_mesh());
  const bool is_apart = !(mesh["shard"] == world_mesh()); // not where there is one expert
  EXPECT_EQ(fsdp(*mixture).state()->groups().size(), is_apart ? 3U : 2U);
  auto handle = fsdp(*mixture);
  EXPECT_EQ(handle.parameter_names().size(), 6U);
  process_context().reset_counters();
  handle.unshard();
  const int64_t gathers = (world_size() > 1 ? 1 : 0) + (is_apart && mesh.size(0) > 1 ? 1 : 0);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, gathers);
  handle.reshard();
  EXPECT_EQ(handle.unsharded_bytes(), 0);
  mixture->forward(torch::ones({2, 6}, test_device()), mesh.local_rank(1)).sum().backward();
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 2 * gathers);
}

TEST(MeshParts, WithReplicasOfTheirOwn) {
  if (world_size() != 4) GTEST_SKIP() << "2 x 2 ranks";
  const auto two = init_device_mesh(test_device_type(), {2, 2}, {"replicate", "shard"});
  torch::manual_seed(3);
  torch::nn::Linear linear(6, 5), plain(6, 5);
  for (size_t i = 0; i < 2; ++i) plain->parameters()[i].data().copy_(linear->parameters()[i]);
  fully_shard(linear, world_mesh(), {.shard_placement_fn = [&](const std::string& name, const Tensor&) -> ChosenPlacement {
                return {std::nullopt, name == "weight" ? two : DeviceMesh()};
              }});
  EXPECT_EQ(DTensor(linear->weight).mesh(), two);
  EXPECT_EQ(DTensor(linear->weight).placements()[0], Placement(Replicate{}));
  const auto x = torch::ones({1, 6}) * (1 + world_rank());
  linear->forward(x.to(test_device())).square().sum().backward();
  for (int64_t rank = 0; rank < 4; ++rank) (plain->forward(torch::ones({1, 6}) * (1 + rank)).square().sum() / 4).backward();
  EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), plain->weight.grad(), 1e-5, 1e-5);
  EXPECT_TENSORS_CLOSE(full(linear->bias.grad()), plain->bias.grad(), 1e-5, 1e-5);
}

FullyShardOptions on(const DeviceMesh& mesh, InitialWeights weights = InitialWeights::kCheck) {
  return {.initial_weights = weights,
          .shard_placement_fn = [mesh](const std::string&, const Tensor&) { return ChosenPlacement(std::nullopt, mesh); }};
}

TEST(MeshParts, OfWhichTheRanksHaveOtherValuesAreAnErrorOnAllRanks) {
  if (world_size() != 4) GTEST_SKIP() << "2 x 2 ranks";
  const auto mesh = expert_grid();
  torch::nn::Linear linear(3, 3);
  torch::nn::init::constant_(linear->weight, world_rank() == 3 ? 1 : 0); // the other column's agree
  torch::nn::init::zeros_(linear->bias);
  const auto message = error_of([&] { fully_shard(linear, world_mesh(), on(mesh["shard"])); });
  EXPECT_NE(message.find("weight"), std::string::npos) << message;
  EXPECT_FALSE(is_sharded(*linear));
  fully_shard(linear, world_mesh(), on(mesh["shard"], InitialWeights::kBroadcast));
  EXPECT_TENSORS_EQUAL(full(linear->weight), torch::zeros({3, 3}));
}

TEST(MeshParts, SayWhatIsWrong) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5);
  const auto n = world_size();
  const auto cube = init_device_mesh(test_device_type(), {n, 1, 1});
  EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), on(cube)), "1-D mesh (shard) or a 2-D mesh (replicate, shard)");
  auto hybrid = on(init_device_mesh(test_device_type(), {n, 1}));
  hybrid.strategy = tessera::Strategy::kFullShard;
  EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), hybrid), "the strategy full takes a 1-D mesh");
  EXPECT_FALSE(is_sharded(*linear));
  if (n == 1) return;
  const auto first = make_device_mesh(test_device_type(), {1}, {0});
  const auto message = error_of([&] { fully_shard(linear, world_mesh(), on(first)); });
  const auto expected = c10::str("fully_shard: shard_placement_fn chose ", first.to_string(), " for weight, which rank ",
                                 world_rank(), " is outside of");
  if (world_rank() > 0) {
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  } else {
    EXPECT_NE(message.find("shard_placement_fn threw for weight"), std::string::npos) << message;
  }
  EXPECT_FALSE(is_sharded(*linear));
  fully_shard(linear, world_mesh());
}

} // namespace
} // namespace tessera::testing::mesh_parts_test
