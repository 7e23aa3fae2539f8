// Experts: modules of one model that other ranks do not have, beside all that training and checkpoints do with a model.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/column_experts.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::experts_test {
namespace {

using torch::Tensor;

/// A layer that all share, the experts in `held`, and a head.
struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(const std::vector<int64_t>& held) {
    register_experts(*this, held, 6);
    torch::manual_seed(1);
    stem = register_module("stem", torch::nn::Linear(6, 6));
    head = register_module("head", torch::nn::Linear(6, 1));
  }
  Tensor forward(const Tensor& x, int64_t expert) {
    auto& chosen = *named_children()[expert_name(expert)]->as<torch::nn::Linear>();
    return head(torch::tanh(chosen.forward(torch::tanh(stem(x)))));
  }
  torch::nn::Linear stem{nullptr}, head{nullptr};
};
TORCH_MODULE(Mixture);

/// A model in training, with an average of its weights and a scaler of its loss.
struct Training {
  explicit Training(Mixture mixture) : model(std::move(mixture)) {}

  /// `loss` has the gradients of all ranks' mean, or becomes so.
  void step(const Tensor& loss) {
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    norms.push_back(clip_grad_norm_(*model, 0.05).item<double>());
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    average.update_parameters(*model);
  }
  StateDict state() {
    auto state = state_dict(*model, optimizer, {.flatten_optimizer_state_dict = true}); // ranks have other parameters
    state.merge(state_dict(average));
    state.merge(state_dict(scaler));
    return state;
  }

  Mixture model;
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-2)};
  AveragedModel average{*model, ema(0.5)};
  GradScaler scaler{{.init_scale = 1024}};
  std::vector<double> norms;
};

/// The model with this rank's expert alone. Divides the expert's gradients by all ranks, as those of the rest are.
Mixture sharded_mixture(const DeviceMesh& mesh) {
  const int64_t expert = mesh.local_rank(1);
  Mixture mixture(std::vector<int64_t>{expert});
  auto handle = fully_shard(*mixture->named_children()[expert_name(expert)], mesh["shard"]);
  handle.set_gradient_divide_factor(static_cast<double>(world_size()));
  fully_shard(*mixture, world_mesh());
  return mixture;
}

Tensor rows_of(int64_t step, int64_t rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return torch::randn({3, 6}, generator, torch::kFloat);
}

Tensor loss_of(Training& training, int64_t step, int64_t rank, const DeviceMesh& mesh) {
  const auto rows = rows_of(step, rank).to(training.model->stem->weight.device());
  return training.model->forward(rows, rank % mesh.size(1)).square().mean();
}

void step(Training& sharded, Training& plain, int64_t number, const DeviceMesh& mesh) {
  auto mean = torch::zeros({});
  for (int64_t rank = 0; rank < world_size(); ++rank) mean = mean + loss_of(plain, number, rank, mesh) / world_size();
  plain.step(mean);
  sharded.step(loss_of(sharded, number, world_rank(), mesh));
  EXPECT_NEAR(sharded.norms.back(), plain.norms.back(), 1e-5);
}

void expect_equal(Training& sharded, Training& plain) {
  const auto expected = plain.model->named_parameters();
  for (const auto& item : sharded.model->named_parameters()) {
    SCOPED_TRACE(item.key());
    EXPECT_TENSORS_CLOSE(full(item.value()), expected[item.key()].detach());
  }
  const AveragedWeights of_sharded(sharded.average, *sharded.model), of_plain(plain.average, *plain.model);
  for (const auto& item : sharded.model->named_parameters()) {
    SCOPED_TRACE("average of " + item.key());
    EXPECT_TENSORS_CLOSE(full(item.value()), expected[item.key()].detach());
  }
}

std::vector<int64_t> all_experts(const DeviceMesh& mesh) {
  std::vector<int64_t> all(static_cast<size_t>(mesh.size(1)));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  return all;
}

TEST(Experts, TrainAsInTheUnshardedModelThroughACheckpoint) {
  const auto mesh = expert_grid();
  const SharedFolder folder;
  Training plain{Mixture(all_experts(mesh))}, sharded{sharded_mixture(mesh)};
  for (int64_t number = 0; number < 3; ++number) step(sharded, plain, number, mesh);
  expect_equal(sharded, plain);

  checkpoint::save(sharded.state(), folder.path() / "mixture");
  Training resumed{sharded_mixture(mesh)};
  checkpoint::load(resumed.state(), folder.path() / "mixture");
  for (int64_t number = 3; number < 5; ++number) step(resumed, plain, number, mesh);
  expect_equal(resumed, plain);
}

TEST(Experts, KeepTheirBuffersWhereTheInitialWeightsAreBroadcast) {
  const auto mesh = expert_grid();
  const int64_t expert = mesh.local_rank(1);
  Mixture mixture(std::vector<int64_t>{expert});
  const auto held = mixture->named_children()[expert_name(expert)];
  held->register_buffer("tokens", torch::full({2}, static_cast<double>(expert)));
  mixture->register_buffer("step", torch::full({1}, static_cast<double>(world_rank())).expand({3}));
  fully_shard(*held, mesh["shard"]);
  fully_shard(*mixture, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  EXPECT_TRUE(held->buffers()[0].eq(static_cast<double>(expert)).all().item<bool>());
  EXPECT_TRUE(mixture->named_buffers()["step"].eq(0).all().item<bool>()); // an expanded one too
}

/// Two weights of the same values on every rank, each sharded on its own mesh.
struct OnTwoMeshes {
  OnTwoMeshes(const DeviceMesh& of_a, const DeviceMesh& of_b) {
    torch::manual_seed(1);
    for (auto* module : {&a, &b}) *module = torch::nn::Linear(3, 3);
    plain_a = a->weight.detach().clone();
    plain_b = b->weight.detach().clone();
    fully_shard(a, of_a, {.initial_weights = InitialWeights::kBroadcast});
    fully_shard(b, of_b, {.initial_weights = InitialWeights::kBroadcast});
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::Tensor plain_a, plain_b;
};

struct OtherMesh {
  std::string name;
  DeviceMesh mesh;
  bool has_all_ranks;
};

std::vector<OtherMesh> other_meshes() {
  const int64_t n = world_size(), half = n % 2 == 0 ? 2 : 1;
  return {{"a mesh of another name", init_device_mesh(mesh_device_type, {n}, {"other"}), true},
          {"two dims", init_device_mesh(mesh_device_type, {half, n / half}, {"replicate", "shard"}), true},
          {"half of the ranks", init_device_mesh(mesh_device_type, {half, n / half}, {"copies", "expert"})["expert"], half == 1},
          {"one rank", init_device_mesh(mesh_device_type, {n, 1}, {"experts", "expert"})["expert"], n == 1}};
}

using OfTwo = std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>;

TEST(Experts, ParametersOfTwoMeshesAreReadTogetherWithoutGradMode) {
  const std::vector<std::pair<std::string, OfTwo>> reads{
      {"add", [](auto& a, auto& b) { return a + b; }},
      {"of what was computed", [](auto& a, auto& b) { return (a + 1) * (b * 2); }},
      {"mm", [](auto& a, auto& b) { return a.mm(b); }},
      {"dot", [](auto& a, auto& b) { return (a * b).sum(); }},
      {"cat",
       [](auto& a, auto& b) {
         return torch::cat({a, b});
       }},
      {"into what was computed", [](auto& a, auto& b) { return (a + 1).add_(b); }},
      {"where", [](auto& a, auto& b) { return torch::where(a > b, a, b); }}};
  const torch::NoGradGuard no_grad;
  for (const auto& other : other_meshes()) {
    const OnTwoMeshes two(world_mesh(), other.mesh);
    for (const auto& [name, read] : reads) {
      SCOPED_TRACE(name + " on " + other.name);
      EXPECT_TENSORS_CLOSE(full(read(two.a->weight, two.b->weight)), read(two.plain_a, two.plain_b), 1e-6, 1e-6);
      EXPECT_TENSORS_CLOSE(full(read(two.b->weight, two.a->weight)), read(two.plain_b, two.plain_a), 1e-6, 1e-6);
    }
  }
}

TEST(Experts, WritesOfAParameterOfAnotherMeshNeedAllRanksOfTheWritten) {
  using Write = std::function<void(const torch::Tensor&, const torch::Tensor&)>;
  const std::vector<std::pair<std::string, Write>> writes{{"add_", [](auto& a, auto& b) { a.add_(b, .5); }},
                                                          {"copy_", [](auto& a, auto& b) { a.copy_(b); }},
                                                          {"lerp_", [](auto& a, auto& b) { a.lerp_(b, .25); }},
                                                          {"addcmul_", [](auto& a, auto& b) { a.addcmul_(b, b); }}};
  for (const auto& other : other_meshes()) {
    for (const auto& entry : writes) {
      const auto& [name, write] = entry;
      SCOPED_TRACE(name + " on " + other.name);
      OnTwoMeshes two(world_mesh(), other.mesh);
      const torch::NoGradGuard no_grad;
      write(two.b->weight, two.a->weight);
      write(two.plain_b, two.plain_a);
      EXPECT_TENSORS_CLOSE(full(two.b->weight), two.plain_b, 1e-6, 1e-6);
      const auto error = error_of([&] { entry.second(two.a->weight, two.b->weight); });
      if (!other.has_all_ranks) {
        EXPECT_NE(error.find("the arguments lie on different meshes: the parameter weight on " + world_mesh().to_string() +
                             " and the parameter weight on " + other.mesh.to_string()),
                  std::string::npos)
            << error;
        continue;
      }
      write(two.plain_a, two.plain_b);
      EXPECT_EQ(error, "no error");
      EXPECT_TENSORS_CLOSE(full(two.a->weight), two.plain_a, 1e-6, 1e-6);
    }
  }
}

TEST(Experts, GradientsOfTwoMeshesAreNamed) {
  for (const auto& other : other_meshes()) {
    OnTwoMeshes two(world_mesh(), other.mesh);
    two.b(two.a(torch::ones({1, 3}, mesh_device_type))).sum().backward();
    EXPECT_THROWS_WITH(two.a->weight.grad() + two.b->weight.grad(),
                       "aten::add.Tensor: the arguments lie on different meshes: the gradient of weight on " +
                           world_mesh().to_string() + " and the gradient of weight on " + other.mesh.to_string());
  }
}

} // namespace
} // namespace tessera::testing::experts_test
