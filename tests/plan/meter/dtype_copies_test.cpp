// What operators on several dtypes hold on the meta device, beside what they hold on this CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/base/meta_memory.h>
#include <tessera/plan/meta_operators.h>
#include <tessera/plan/meter/dtype_copies.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/held_memory.h>

namespace tessera::testing::dtype_copies_test {
namespace {

using internal::MetaMemory;
using torch::Tensor;

/// An operator of a [64, 48] in one dtype and a [64, 48] in another.
struct Case {
  std::string name;
  torch::Dtype left, right;
  std::function<Tensor(const Tensor&, const Tensor&)> run;
};

Tensor input(torch::Dtype dtype, torch::Device device) { return torch::ones({64, 48}, torch::dtype(dtype).device(device)); }

int64_t held_on_cpu(const Case& each) {
  const auto left = input(each.left, torch::kCPU), right = input(each.right, torch::kCPU);
  HeldMemory held;
  each.run(left, right);
  return held.peak();
}

int64_t held_on_meta(const Case& each, bool counts_copies) {
  const auto left = input(each.left, torch::kMeta), right = input(each.right, torch::kMeta);
  const MetaMemory memory([] { return uint8_t{0}; });
  std::unique_ptr<internal::DtypeCopies> copies;
  if (counts_copies) copies = std::make_unique<internal::DtypeCopies>();
  each.run(left, right);
  int64_t now = 0, peak = 0;
  for (const auto& event : memory.events()) {
    if (event.kind == MetaMemory::Event::Kind::kUse) continue;
    now += event.kind == MetaMemory::Event::Kind::kBegin ? event.bytes : -event.bytes;
    peak = std::max(peak, now);
  }
  return peak;
}

constexpr auto kFloat = torch::kFloat, kHalf = torch::kBFloat16, kBool = torch::kBool;

TEST(DtypeCopies, AreThoseOfTheCpu) {
  register_meta_operators();
  const std::vector<Case> cases{
      {"product", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a * b; }},
      {"product with a row", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a * b[0]; }},
      {"quotient by a scale", kHalf, kFloat,
       [](const Tensor& a, const Tensor& b) { return a / b.narrow(0, 0, 1).narrow(1, 0, 1); }},
      {"sum in place", kFloat, kHalf, [](const Tensor& a, const Tensor& b) { return a.add_(b); }},
      {"sum in place into fewer bits", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a.add_(b); }},
      {"mask", kFloat, kBool, [](const Tensor& a, const Tensor& b) { return a * b; }},
      {"comparison", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a < b; }},
      {"number without dims", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a * b[0][0]; }},
      {"one dtype", kHalf, kHalf, [](const Tensor& a, const Tensor& b) { return a * b; }},
      {"copy", kHalf, kFloat, [](const Tensor& a, const Tensor& b) { return a.copy_(b); }},
      {"choice", kHalf, kHalf, [](const Tensor& a, const Tensor& b) { return torch::where(b > 0, a, b); }},
  };
  constexpr int64_t kNumbers = 64; // of one element, which the CPU copies too
  for (const auto& each : cases) EXPECT_NEAR(held_on_meta(each, true), held_on_cpu(each), kNumbers) << each.name;
  const auto& product = cases.front();
  EXPECT_EQ(held_on_meta(product, false), int64_t{64} * 48 * 4) << "the result alone, as on CUDA";
}

TEST(DtypeCopies, OfProductsInFloat8AreTheKernels) {
  register_meta_operators();
  const auto scaled = [](const Tensor& a, const Tensor& b) {
    const auto one = torch::ones({}, a.options().dtype(torch::kFloat));
    return at::_scaled_mm(a.to(torch::kFloat8_e4m3fn), b.to(torch::kFloat8_e4m3fn).t(), one, one, {}, {}, kHalf);
  };
  const Case product{"_scaled_mm", kHalf, kHalf, scaled};
  const MetaOperatorsOf cuda(c10::kCUDA);
  const auto there = held_on_meta(product, false);
  const MetaOperatorsOf cpu(c10::kCPU);
  EXPECT_GT(held_on_meta(product, false), 3 * there);
}

} // namespace
} // namespace tessera::testing::dtype_copies_test
