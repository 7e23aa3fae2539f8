// Adaptive clipping beside its formula, and on shards beside one process.
#include <gmock/gmock.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/step_in_backward.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/optim/layouts.h>
#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::adaptive_clip_test {
namespace {

/// The rule of the paper, unit by unit.
at::Tensor clipped(const at::Tensor& parameter, const at::Tensor& gradient, double factor, double eps) {
  auto result = gradient.clone();
  if (result.numel() == 0) return result;
  const int64_t units = parameter.dim() > 1 ? parameter.size(0) : 1;
  const auto w = parameter.detach().reshape({units, -1}), g = result.view({units, -1});
  for (int64_t unit = 0; unit < units; ++unit) {
    const double limit = factor * std::max(w[unit].norm().item<double>(), eps), norm = g[unit].norm().item<double>();
    if (norm > limit) g[unit].mul_(limit / norm);
  }
  return result;
}

TEST(AdaptiveClip, LimitsEachUnitByItsNorm) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {7}, {4, 5}, {3, 2, 3, 3}, {0, 4}}) {
    auto parameter = torch::randn(shape, generator, torch::kDouble).requires_grad_();
    if (shape.size() == 2 && shape[0] > 0) parameter.detach()[1].zero_(); // a unit whose norm is 0
    const auto gradient = torch::randn(shape, generator, torch::kDouble) * 0.1;
    parameter.mutable_grad() = gradient.clone();
    clip_grad_adaptive_(std::vector<at::Tensor>{parameter, parameter}, 0.05, 1e-2);
    EXPECT_TRUE(torch::allclose(parameter.grad(), clipped(parameter, gradient, 0.05, 1e-2), 1e-12, 1e-14)) << parameter.sizes();
  }
}

TEST(AdaptiveClip, IsThatOfOneProcessOnAnyLayout) {
  for (const auto& [mesh, placements] : layouts(37, 24)) {
    SCOPED_TRACE(to_string(placements));
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
    const auto whole = torch::randn({37, 24}, generator, torch::kDouble),
               gradient = torch::randn({37, 24}, generator, torch::kDouble);
    auto parts = distribute_tensor(whole.to(mesh.device()), mesh, placements).requires_grad_();
    parts.mutable_grad() = distribute_tensor(gradient.to(mesh.device()), mesh, placements);
    clip_grad_adaptive_(std::vector<at::Tensor>{parts}, 0.05);
    EXPECT_TRUE(torch::allclose(full(parts.grad()), clipped(whole, gradient, 0.05, 1e-3), 1e-12, 1e-14));
  }
}

TEST(AdaptiveClip, OfAModelTakesOneReductionAMeshDim) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_net(), net = make_net();
    net->to(test_device());
    shard_model(net, strategy);
    loss_of(plain, global_batch(0)).backward();
    loss_of(net, own_batch(0)).backward();
    clip_grad_adaptive_(*plain, 0.01);
    process_context().reset_counters();
    clip_grad_adaptive_(*net, 0.01);
    EXPECT_LE(process_context().count(CollectiveKind::kAllReduce).calls, 1);
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(full(item.value().grad()), expected[item.key()].grad(), 1e-3, 1e-6)) << item.key();
  }
}

TEST(AdaptiveClip, ComesBeforeStepsInBackward) {
  auto net = make_net(), after = make_net();
  for (auto* each : {&net, &after}) {
    (*each)->to(test_device());
    shard_model(*each, strategies()[0]);
  }
  FusedSGD in_backward(net->parameters(), 0.1), own(after->parameters(), 0.1);
  const auto stepping =
      step_in_backward(*net, in_backward,
                       {.before_step = [](const std::vector<at::Tensor>& parameters) { clip_grad_adaptive_(parameters, 0.01); }});
  EXPECT_THROWS_WITH(clip_grad_adaptive_(*net), "embed.weight is stepped in its backward");
  for (int64_t step = 0; step < 2; ++step) {
    loss_of(net, own_batch(step)).backward();
    loss_of(after, own_batch(step)).backward();
    clip_grad_adaptive_(*after, 0.01);
    own.step();
    own.zero_grad();
  }
  EXPECT_LE(parameter_difference(*net, *after), 1e-7);
}

TEST(AdaptiveClip, RefusesWhatItCannotLimit) {
  auto weight = torch::ones({3, 3}).requires_grad_();
  EXPECT_THROWS_WITH(clip_grad_adaptive_(std::vector<at::Tensor>{weight}, 0), "clip_factor is 0; it must be positive");
  EXPECT_THROWS_WITH(clip_grad_adaptive_(std::vector<at::Tensor>{weight}, 0.1, -1), "eps is -1; it must be positive");
  weight.mutable_grad() = torch::ones({3, 3}).to_sparse();
  EXPECT_THROWS_WITH(clip_grad_adaptive_(std::vector<at::Tensor>{weight}),
                     "the gradient of a parameter of shape [3, 3] is sparse");
}

} // namespace
} // namespace tessera::testing::adaptive_clip_test
