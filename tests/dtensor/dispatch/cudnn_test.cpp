// What composite kernels of CUDA take from cuDNN. Kernels of the tests stand for these, so that every device shows the choice.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <tessera/dtensor/dispatch/cudnn.h>
#include <torch/library.h>

#include <tessera/tests/dtensor/operators/op_cases.h>

namespace tessera::testing::cudnn_test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using ::testing::ElementsAre;

constexpr auto kComposite = c10::DispatchKey::CompositeImplicitAutograd;

c10::DispatchKey device_key() { return tests_the_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1; }

/// As CUDA's autograd chooses, for a test's tensors.
std::optional<torch::Library> choices_of_cuda() {
  if (test_device_type() == c10::kCUDA) return std::nullopt;
  std::optional<torch::Library> library(std::in_place, torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCPU, __FILE__,
                                        static_cast<uint32_t>(__LINE__));
  internal::dispatch::register_cudnn_choices(*library);
  return library;
}

/// The simulated device is none that has cuDNN.
bool may_have_cudnn() { return test_device_type() != c10::kPrivateUse1; }

TEST(Cudnn, BatchNormOfDTensorsIsTheNativeOne) {
  if (!may_have_cudnn()) GTEST_SKIP();
  const auto choices = choices_of_cuda();
  std::vector<bool> may_take_cudnn;
  torch::Library library(torch::Library::IMPL, "aten", kComposite, __FILE__, __LINE__);
  library.impl("_batch_norm_impl_index",
               [&](const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& mean, const std::optional<Tensor>& var, bool training, double momentum,
                   double eps, bool cudnn_enabled) {
                 may_take_cudnn.push_back(cudnn_enabled);
                 auto [y, y_mean, y_rstd] = at::native_batch_norm(x, weight, bias, mean, var, training, momentum, eps);
                 return std::tuple(y, y_mean, y_rstd, torch::empty({0}, torch::kByte), int64_t{0});
               });
  const auto norm = [](const Tensor& x) { return torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, /*cudnn_enabled=*/true); };
  const auto whole = values({4, 2, 3}, 1);
  const auto x = Tensor(make(whole, line_mesh(), {Shard{0}}));
  const auto expected = norm(whole);
  EXPECT_TENSORS_CLOSE(whole_of(norm(x)), expected);
  EXPECT_TENSORS_CLOSE(whole_of(norm(x.detach().requires_grad_()).detach()), expected);
  const c10::InferenceMode inference;
  EXPECT_TENSORS_CLOSE(whole_of(norm(make(whole, line_mesh(), {Shard{0}}))), expected);
  EXPECT_THAT(may_take_cudnn, ElementsAre(true, false, false, false));
}

/// A kernel that no rule describes runs on copies of what is split.
TEST(Cudnn, RunningStatisticsAreNotUpdatedInACopy) {
  const auto mesh = line_mesh();
  const auto part = [&](const Tensor& whole, const Placement& placement) { return Tensor(make(whole, mesh, {placement})); };
  const auto x = part(values({4, 3, 2}, 1), Shard{0}), ones = part(torch::ones({3}, torch::kDouble), Replicate{}),
             mean = part(torch::zeros({3}, torch::kDouble), Shard{0});
  const auto* const text = "running statistics must be replicated to be updated, not (Shard(0))";
  EXPECT_THROWS_WITH(at::batch_norm_update_stats(x, mean, ones, 0.5), text);
  EXPECT_THROWS_WITH(at::cudnn_batch_norm(x, ones, ones, mean, ones, /*training=*/true, 0.5, 1e-5), text);
  EXPECT_THROWS_WITH(at::miopen_batch_norm(x, ones, ones, ones, mean, /*training=*/true, 0.5, 1e-5), text);
  EXPECT_TENSORS_EQUAL(whole_of(mean), torch::zeros({3}, torch::kDouble));
  if (!tests_the_cpu()) return; // the simulated device does not know that they are written
  const auto plain = torch::zeros({3}, torch::kDouble), whole = part(plain, Replicate{});
  at::batch_norm_update_stats(values({4, 3, 2}, 1), plain, torch::ones({3}, torch::kDouble), 0.5);
  at::batch_norm_update_stats(x, whole, ones, 0.5);
  EXPECT_TENSORS_CLOSE(whole_of(whole), plain);
}

TEST(Cudnn, DTensorsAreNotAcceptable) {
  if (!may_have_cudnn()) GTEST_SKIP();
  const auto choices = choices_of_cuda();
  torch::Library library(torch::Library::IMPL, "aten", kComposite, __FILE__, __LINE__);
  library.impl("cudnn_is_acceptable", [](const Tensor&) { return true; });
  const auto mesh = line_mesh();
  const auto whole = values({4, 2}, 1);
  EXPECT_TRUE(at::cudnn_is_acceptable(whole));
  EXPECT_FALSE(at::cudnn_is_acceptable(make(whole, mesh, {Shard{0}})));
  EXPECT_FALSE(at::cudnn_is_acceptable(Tensor(make(whole, mesh, {Shard{0}})).requires_grad_()));
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::cudnn_is_acceptable(whole));
  EXPECT_FALSE(at::cudnn_is_acceptable(make(whole, mesh, {Shard{0}})));
}

using Recurrent = std::function<Tensor(const Tensor& x, const Tensor& state, const Tensors& weights)>;

/// Outputs and gradients of a recurrent layer on DTensors, whose batch is split, beside those of plain tensors.
void check_recurrent(int64_t gates, const Placement& of_weights, at::ScalarType dtype, const Recurrent& run) {
  SCOPED_TRACE(::testing::Message() << gates << " gates of " << dtype << ", weights " << of_weights);
  Tensors plain{values({5, 4, 3}, 5), torch::zeros({1, 4, 4}), values({gates * 4, 3}, 1), values({gates * 4, 4}, 2)}, sharded;
  for (const int64_t seed : {3, 4}) plain.push_back(values({gates * 4}, seed));
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto whole = (plain[i] / 50).to(dtype);
    sharded.push_back(Tensor(make(whole, line_mesh(), {i < 2 ? Placement(Shard{1}) : of_weights})).requires_grad_());
    plain[i] = whole.clone().requires_grad_();
  }
  const auto result_of = [&](const Tensors& all) { return run(all[0], all[1], Tensors(all.begin() + 2, all.end())); };
  const auto expected = result_of(plain), actual = result_of(sharded);
  EXPECT_TENSORS_CLOSE(whole_of(actual.detach()), expected.detach(), 1e-5, 1e-5);
  expected.square().sum().backward();
  whole_of(actual.square().sum()).backward();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(sharded[i].grad()), plain[i].grad(), 1e-5, 1e-5) << i;
}

TEST(Cudnn, RecurrentLayersOfDTensors) {
  const auto choices = choices_of_cuda();
  torch::Library library(torch::Library::IMPL, "aten", kComposite, __FILE__, __LINE__);
  if (may_have_cudnn()) library.impl("cudnn_is_acceptable", [](const Tensor& x) { return is_dtensor(x); });
  for (const Placement& of_weights : {Placement(Replicate{}), Placement(Shard{0})}) {
    for (const auto dtype : {at::kDouble, at::kFloat}) { // a Float is oneDNN's on the CPU
      check_recurrent(4, of_weights, dtype, [](const Tensor& x, const Tensor& state, const Tensors& weights) {
        return std::get<0>(torch::lstm(x, {state, state}, weights, true, 1, 0, true, false, false));
      });
      check_recurrent(1, of_weights, dtype, [](const Tensor& x, const Tensor& state, const Tensors& weights) {
        return std::get<0>(torch::rnn_tanh(x, state, weights, true, 1, 0, true, false, false));
      });
    }
  }
}

TEST(Cudnn, GridSamplerSplitsTheBatch) {
  if (test_device_type() == c10::kCUDA) GTEST_SKIP() << "which has the kernel";
  torch::Library library(torch::Library::IMPL, "aten", device_key(), __FILE__, __LINE__);
  library.impl("cudnn_grid_sampler",
               [](const Tensor& x, const Tensor& grid) { return at::grid_sampler_2d(x, grid, 0, 0, true); });
  library.impl("cudnn_grid_sampler_backward", [](const Tensor& x, const Tensor& grid, const Tensor& gradient) {
    return at::grid_sampler_2d_backward(gradient, x, grid, 0, 0, true, {true, true});
  });
  const auto mesh = line_mesh();
  const auto images = 2 * mesh.size();
  const auto whole = values({images, 2, 3, 3}, 1), places = values({images, 2, 2, 2}, 2) / 40;
  auto image = whole.clone().requires_grad_(), grid = places.clone().requires_grad_();
  auto image_part = Tensor(make(whole, mesh, {Shard{0}})).requires_grad_();
  auto grid_part = Tensor(make(places, mesh, {Shard{0}})).requires_grad_();
  const auto expected = at::grid_sampler_2d(image, grid, 0, 0, true);
  const auto result = at::cudnn_grid_sampler(image_part, grid_part);
  if (mesh.size() > 1) EXPECT_EQ(DTensor(result).placements()[0], Placement(Shard{0}));
  EXPECT_TENSORS_CLOSE(whole_of(result.detach()), expected.detach());
  expected.square().sum().backward();
  whole_of(result.square().sum()).backward();
  EXPECT_TENSORS_CLOSE(whole_of(image_part.grad()), image.grad());
  EXPECT_TENSORS_CLOSE(whole_of(grid_part.grad()), grid.grad());
}

} // namespace
} // namespace tessera::testing::cudnn_test
