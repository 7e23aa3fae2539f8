// What a rank outside the mesh of a DTensor holds, and knows of the results that the others compute.
#include <ATen/ScalarOps.h>
#include <tessera/dtensor/register_sharding.h>
#include <torch/library.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::outside_mesh_test {
namespace {

using at::Tensor;

Tensor values() { return torch::arange(15, torch::kFloat).view({5, 3}); }

DeviceMesh mesh_without_the_last_rank() {
  std::vector<int64_t> ranks(world_size() - 1);
  std::iota(ranks.begin(), ranks.end(), 0);
  return make_device_mesh(test_device_type(), {world_size() - 1}, ranks);
}

TEST(Mesh, ARankOutsideHoldsNothing) {
  if (world_size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = mesh_without_the_last_rank();
  auto tensor = distribute_tensor(values(), mesh, {Shard{0}});
  const bool inside = mesh.coordinate().has_value();
  EXPECT_EQ(tensor.local().numel() == 0, !inside);
  auto doubled = DTensor((tensor * 2).t().contiguous().sum(0, true));
  EXPECT_EQ(doubled.sizes(), (std::vector<int64_t>{1, 5}));
  tensor.mul_(2).add_(1);
  if (inside) {
    EXPECT_TENSORS_EQUAL(tensor.full_tensor(), values() * 2 + 1);
  } else {
    EXPECT_EQ(doubled.local().numel(), 0);
    EXPECT_THROWS_WITH(tensor.sum().item(), "this rank is outside the mesh");
  }
}

/// Also those that the operators tell by running alone.
TEST(Mesh, ARankOutsideKnowsTheShapesOfResults) {
  if (world_size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto mesh = mesh_without_the_last_rank();
  const auto image = torch::arange(200, torch::kFloat).view({4, 2, 5, 5}), weight = torch::ones({3, 2, 3, 3});
  const auto x = Tensor(distribute_tensor(image, mesh, {Shard{0}})), w = Tensor(distribute_tensor(weight, mesh, {Replicate{}}));
  const auto run = [](const Tensor& x, const Tensor& w) {
    return torch::adaptive_avg_pool2d(torch::conv2d(x, w), {2, 2}).flatten(1);
  };
  const auto expected = run(image, weight), result = run(x, w);
  EXPECT_EQ(torch::conv2d(x, w).sizes(), torch::conv2d(image, weight).sizes());
  EXPECT_EQ(result.sizes(), expected.sizes());
  if (mesh.coordinate()) {
    EXPECT_TENSORS_CLOSE(DTensor(result).full_tensor(), expected);
  } else {
    EXPECT_THROWS_WITH(torch::cholesky(x), "this rank is outside the mesh, and cannot tell the shape of the result");
  }
}

/// Calls that differ in nothing but a number's type.
TEST(Mesh, ARankOutsideKnowsTheTypesOfResults) {
  if (world_size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto x = Tensor(distribute_tensor(values().to(at::kLong), mesh_without_the_last_rank(), {Shard{0}}));
  EXPECT_EQ(x.mul(2).scalar_type(), at::kLong);
  EXPECT_EQ(x.mul(0.5).scalar_type(), at::kFloat);
  EXPECT_EQ(x.mul(2).scalar_type(), at::kLong);
  EXPECT_EQ(x.add(torch::tensor(0.5, torch::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ(x.add(at::native::wrapped_scalar_tensor(0.5)).scalar_type(), at::kFloat);
}

/// Each row twice. Reads through a pointer.
Tensor repeated_rows(const Tensor& rows) {
  TORCH_CHECK(rows.is_contiguous(), "the rows have gaps");
  const auto* from = rows.const_data_ptr<float>();
  const auto columns = rows.size(1);
  auto result = at::empty({rows.size(0), 2 * columns}, rows.options());
  auto* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) to[i] = from[i / (2 * columns) * columns + i % columns];
  return result;
}

TEST(Mesh, ARankOutsideRunsAProgramsKernelOnDenseZeros) {
  if (world_size() < 2 || !tests_the_cpu()) GTEST_SKIP() << "needs 2 ranks, and memory that the kernel can read";
  static auto library = torch::Library(torch::Library::FRAGMENT, "tessera_outside", std::nullopt, __FILE__, __LINE__);
  library.def("repeated_rows(Tensor rows) -> Tensor");
  library.impl("repeated_rows", torch::dispatch(c10::DispatchKey::CPU, &repeated_rows));
  library.def("refused(Tensor rows) -> Tensor");
  library.impl("refused", torch::dispatch(c10::DispatchKey::CPU, [](const Tensor& rows) {
                 TORCH_CHECK(rows.numel() == 0 || rows.abs().sum().item<double>() > 0, "only zeros");
                 return rows.repeat({1, 2});
               }));
  register_sharding("tessera_outside::repeated_rows", "m*->m*");
  register_sharding("tessera_outside::refused", "m*->m*");
  const auto call = [](const char* name, const Tensor& rows) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Tensor(const Tensor&)>().call(rows);
  };
  const auto mesh = mesh_without_the_last_rank();
  const auto x = Tensor(distribute_tensor(values() + 1, mesh, {Shard{0}}));
  const auto result = call("tessera_outside::repeated_rows", x);
  EXPECT_EQ(result.sizes(), (std::vector<int64_t>{5, 6}));
  if (mesh.coordinate()) {
    EXPECT_TENSORS_EQUAL(DTensor(result).full_tensor(), torch::cat({values() + 1, values() + 1}, 1));
    EXPECT_EQ(call("tessera_outside::refused", x).size(1), 6);
  } else {
    EXPECT_THROWS_WITH(call("tessera_outside::refused", x), "this rank is outside the mesh, and cannot tell the shape");
  }
}

} // namespace
} // namespace tessera::testing::outside_mesh_test
