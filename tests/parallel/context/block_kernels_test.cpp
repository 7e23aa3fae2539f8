#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/context/block_kernels.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::block_kernels_test {
namespace {

using internal::Block, internal::BlockKernel, internal::BlockKind;

TEST(BlockKernels, AreChosenByDeviceDtypeAndShape) {
  const auto of = [](const BlockKind& kind) { return internal::kernel_for(kind); };
  EXPECT_EQ(of({at::kCPU, at::kFloat, 8, 8, false}), BlockKernel::kFlashCpu);
  EXPECT_EQ(of({at::kCPU, at::kBFloat16, 5, 5, true}), BlockKernel::kFlashCpu);
  EXPECT_EQ(of({at::kCPU, at::kFloat, 8, 4, false}), BlockKernel::kMath);
  EXPECT_EQ(of({at::kCPU, at::kFloat, 0, 0, false}), BlockKernel::kMath);
  EXPECT_EQ(of({at::kCUDA, at::kBFloat16, 64, 64, false}), BlockKernel::kFlash);
  EXPECT_EQ(of({at::kCUDA, at::kHalf, 256, 256, false}), BlockKernel::kFlash);
  EXPECT_EQ(of({at::kCUDA, at::kHalf, 264, 264, false}), BlockKernel::kEfficient);
  EXPECT_EQ(of({at::kCUDA, at::kBFloat16, 64, 64, true}), BlockKernel::kEfficient);
  EXPECT_EQ(of({at::kCUDA, at::kFloat, 64, 32, false}), BlockKernel::kEfficient);
  EXPECT_EQ(of({at::kCUDA, at::kFloat, 12, 12, false}), BlockKernel::kMath);
  EXPECT_EQ(of({at::kCUDA, at::kDouble, 64, 64, false}), BlockKernel::kMath);
  EXPECT_EQ(of({at::kPrivateUse1, at::kFloat, 64, 64, false}), BlockKernel::kMath);
}

// Values with fewer features than the queries have no kernel on the CPU: what is computed by products is compared with autograd.
TEST(BlockKernels, ComputeByProductsWhatAutogradComputes) {
  torch::manual_seed(4);
  for (const bool is_causal : {false, true}) {
    const auto query = torch::randn({2, 4, 5, 6}, torch::kDouble).requires_grad_(),
               key = torch::randn({2, 2, 5, 6}, torch::kDouble).requires_grad_(),
               value = torch::randn({2, 2, 5, 3}, torch::kDouble).requires_grad_();
    auto mask = is_causal ? torch::Tensor() : torch::randn({1, 1, 5, 5}, torch::kDouble);
    if (mask.defined()) mask.select(2, 1).fill_(-internal::kInfinity);
    const Block block{query.detach(), key.detach(), value.detach(), mask, is_causal, 0.7};
    const auto got = internal::attend(block);

    auto scores = query.matmul(key.repeat_interleave(2, 1).transpose(-2, -1)) * 0.7;
    if (mask.defined()) scores = scores + mask;
    if (is_causal) scores = scores.masked_fill(torch::ones({5, 5}, torch::kBool).tril().logical_not(), -internal::kInfinity);
    const auto sees_none = scores.detach().eq(-internal::kInfinity).all(-1, true);
    const auto weights = torch::where(sees_none, torch::zeros_like(scores),
                                      torch::where(sees_none, torch::zeros_like(scores), scores).softmax(-1));
    const auto expected = weights.matmul(value.repeat_interleave(2, 1));
    EXPECT_TENSORS_CLOSE(got.out, expected.detach(), 1e-12, 1e-12);
    EXPECT_TENSORS_EQUAL(got.lse.eq(-internal::kInfinity), sees_none.squeeze(-1));

    const auto upstream = torch::randn({2, 4, 5, 3}, torch::kDouble);
    (expected * upstream).sum().backward();
    const auto gradients = internal::attend_backward(block, upstream, got.out, got.lse);
    EXPECT_TENSORS_CLOSE(gradients.query, query.grad(), 1e-12, 1e-12);
    EXPECT_TENSORS_CLOSE(gradients.key, key.grad(), 1e-12, 1e-12);
    EXPECT_TENSORS_CLOSE(gradients.value, value.grad(), 1e-12, 1e-12);
  }
}

// The kernels of CUDA are reached as far as this build goes: on the CPU they have no kernel, and say so.
TEST(BlockKernels, OfCudaAreCalledWithCudaTensorsAlone) {
  if (torch::cuda::is_available()) {
    for (const auto dtype : {torch::kBFloat16, torch::kFloat}) {
      const auto x = torch::randn({1, 2, 16, 8}, torch::TensorOptions(dtype).device(torch::kCUDA));
      const Block block{x, x, x, {}, true, 0.5};
      const auto got = internal::attend(block);
      const auto expected = at::scaled_dot_product_attention(x, x, x, {}, 0.0, true, 0.5);
      EXPECT_TENSORS_CLOSE(got.out.to(dtype), expected, 1e-2, 1e-2);
      EXPECT_TRUE(internal::attend_backward(block, x, got.out, got.lse).query.isfinite().all().item<bool>());
    }
    return;
  }
  EXPECT_THROWS_WITH(torch::randn({1, 2, 16, 8}, torch::kCUDA), "CUDA");
}

} // namespace
} // namespace tessera::testing::block_kernels_test
