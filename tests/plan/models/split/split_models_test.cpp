// The models of configs, split over ranks as a planned step splits them: their losses are those of one rank.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/plan/model_folder.h>
#include <tessera/tests/plan/models/configs.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::split_models_test {

namespace {

using nlohmann::json;
using torch::Tensor;

PlannedModel read(const json& config) {
  const TemporaryFolder folder;
  folder.write("config.json", config.dump());
  return read_model(folder.path(), {.sequence = 8, .dropout = false});
}

/// The same on every rank.
std::shared_ptr<torch::nn::Module> build(const PlannedModel& planned) {
  torch::manual_seed(5);
  auto module = planned.build();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.normal_(0, 0.3);
  return module;
}

Tensor loss_of(const PlannedModel& planned, torch::nn::Module& module, const PassSettings& settings) {
  return planned.loss(module, planned.batch(settings, torch::kCPU), settings);
}

/// A parameter's gradient, whole.
Tensor whole_gradient(const Tensor& parameter) {
  return is_dtensor(parameter.grad()) ? DTensor(parameter.grad()).full_tensor() : parameter.grad();
}

void expect_close(const Tensor& a, const Tensor& b, const std::string& what) {
  EXPECT_TRUE(torch::allclose(a, b, 1e-4, 1e-5)) << what << ": differ by " << (a - b).abs().max().item<double>();
}

} // namespace

TEST(SplitModels, HaveTheLossAndGradientsOfOneRankUnderTensorParallelism) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"tp"});
  for (const auto& [name, config] : configs::small()) {
    if (name == "mixtral") continue; // whose tokens `expert_parallel` splits
    for (const bool sequence : {false, true}) {
      if (sequence && (name != "llama" && name != "mistral")) continue;
      SCOPED_TRACE(c10::str(name, sequence ? " with its sequence" : ""));
      const auto planned = read(config);
      const auto whole = build(planned), split = build(planned);
      const PassSettings settings{.rows = 2};
      const auto loss = loss_of(planned, *whole, settings);
      loss.backward();
      parallelize(*split, mesh, planned.tensor_parallel(*split, {.ranks = mesh.size(), .sequence = sequence}));
      auto other = loss_of(planned, *split, settings);
      other.backward();
      expect_close(loss, is_dtensor(other) ? DTensor(other).full_tensor() : other, "loss");
      const auto parameters = whole->named_parameters();
      for (const auto& item : split->named_parameters()) {
        const auto& expected = parameters[item.key()].grad();
        if (expected.defined()) expect_close(expected, whole_gradient(item.value()), item.key());
      }
    }
  }
}

TEST(SplitModels, HaveTheLossOfOneRankUnderContextParallelism) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"cp"});
  for (const auto& [name, config] : configs::small()) {
    const auto planned = read(config);
    if (!planned.splits_sequence) continue;
    for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
      SCOPED_TRACE(c10::str(name, " by ", to_string(scheme)));
      const auto model = build(planned);
      const auto whole = loss_of(planned, *model, {.rows = 2});
      const auto part = loss_of(planned, *model, {.rows = 2, .context = mesh, .context_scheme = scheme});
      const auto mean = from_local(part.detach().view({1}), mesh, {Shard{0}}); // all parts are of one length
      expect_close(whole, DTensor(mean).full_tensor().mean(), "loss");
    }
  }
}

} // namespace tessera::testing::split_models_test
