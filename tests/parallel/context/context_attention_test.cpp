#include <gtest/gtest.h>

#include <algorithm>

#include <tessera/tests/parallel/context/attention_cases.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::context_attention_test {
namespace {

constexpr ContextParallel kSchemes[] = {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses};

std::vector<AttentionCase> cases_of(ContextParallel scheme) {
  constexpr uint64_t kCases = 150;
  std::vector<AttentionCase> cases;
  for (uint64_t number = 0; number < kCases; ++number)
    cases.push_back(draw_case(number, scheme == ContextParallel::kUlysses ? std::optional(world_size()) : std::nullopt));
  return sweep(cases, 25);
}

/// Where one kernel happens to be exact, what is left is the rounding of fp32, in which blocks are merged.
double bound_of(double of_one_kernel) { return std::max(2 * of_one_kernel, 1e-6); }

void expect_as_exact_as_one_kernel(at::ScalarType dtype) {
  for (const auto scheme : kSchemes) {
    SCOPED_TRACE(to_string(scheme));
    for (const auto& drawn : cases_of(scheme)) {
      SCOPED_TRACE(drawn.to_string());
      const auto tensors = draw_tensors(drawn);
      const auto exact = in_fp64(drawn, tensors, dtype), one = by_one_kernel(drawn, tensors, dtype),
                 got = over_ranks(drawn, tensors, dtype, scheme);
      const auto errors = relative_errors(got, exact), bounds = relative_errors(one, exact);
      EXPECT_LE(errors.out, bound_of(bounds.out));
      EXPECT_LE(errors.query, bound_of(bounds.query));
      EXPECT_LE(errors.key, bound_of(bounds.key));
      EXPECT_LE(errors.value, bound_of(bounds.value));
    }
  }
}

TEST(ContextAttention, IsAsExactAsOneKernelInFp32) {
  if (test_device_type() != torch::kCPU) GTEST_SKIP() << "the one kernel is that of the CPU";
  expect_as_exact_as_one_kernel(torch::kFloat);
}

TEST(ContextAttention, IsAsExactAsOneKernelInBf16) { expect_as_exact_as_one_kernel(torch::kBFloat16); }

} // namespace
} // namespace tessera::testing::context_attention_test
