// LibTorch's error for a loss of two dtypes: where it comes from, and what is added to it. docs/mixed_precision.md has its words.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::explain_backward_test {
namespace {

using torch::Tensor;
using Loss = std::function<Tensor(const Tensor& output, const Tensor& target)>;

Tensor output_in(torch::ScalarType dtype) { return torch::rand({4, 5}).to(dtype).requires_grad_(); }

TEST(ExplainBackward, ALossOfTwoDtypesNamesTheOperatorTheDtypesAndTheRemedy) {
  const std::map<std::string, Loss> losses{
      {"MseLossBackward0", [](const Tensor& x, const Tensor& y) { return torch::mse_loss(x, y); }},
      {"HuberLossBackward0", [](const Tensor& x, const Tensor& y) { return torch::huber_loss(x, y); }}};
  for (const auto& [node, loss] : losses) {
    for (const auto& [dtype, name] : {std::pair{torch::kBFloat16, "BFloat16"}, {torch::kHalf, "Half"}}) {
      SCOPED_TRACE(node + " of " + name);
      const auto value = loss(output_in(dtype), torch::rand({4, 5}));
      const auto message = error_of([&] { value.backward(); });
      EXPECT_NE(message.find(std::string("Found dtype Float but expected ") + name), std::string::npos) << message;
      EXPECT_NE(message.find(node + " in backward"), std::string::npos) << message;
      EXPECT_NE(message.find("output.to(target.dtype())"), std::string::npos) << message;
      EXPECT_NE(message.find("output_dtype and run the forward by tessera::call"), std::string::npos) << message;
    }
  }
}

/// In its backward a loss of two dtypes has a backward of its own.
struct FailsInside : torch::autograd::Function<FailsInside> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    const torch::AutoGradMode grad_mode(true);
    torch::mse_loss(output_in(torch::kBFloat16), torch::rand({4, 5})).backward();
    return gradients;
  }
};

TEST(ExplainBackward, ABackwardInsideAnotherIsExplainedOnce) {
  const auto loss = FailsInside::apply(torch::ones({2}).requires_grad_()).sum();
  const auto message = error_of([&] { loss.backward(); });
  const auto first = message.find(" in backward: the operator had inputs");
  ASSERT_NE(first, std::string::npos) << message;
  EXPECT_EQ(message.find(" in backward: the operator had inputs", first + 1), std::string::npos) << message;
  EXPECT_NE(message.find("MseLossBackward0 in backward"), std::string::npos) << message;
}

/// No backward runs, so that the text is LibTorch's alone.
TEST(ExplainBackward, BinaryCrossEntropyFailsInForward) {
  EXPECT_THROWS_WITH(torch::binary_cross_entropy(output_in(torch::kBFloat16), torch::rand({4, 5})),
                     "Found dtype Float but expected BFloat16");
}

TEST(ExplainBackward, OtherLossesTakeTwoDtypes) {
  const std::map<std::string, Loss> losses{
      {"l1", [](const Tensor& x, const Tensor& y) { return torch::l1_loss(x, y); }},
      {"smooth l1", [](const Tensor& x, const Tensor& y) { return torch::smooth_l1_loss(x, y); }},
      {"bce with logits", [](const Tensor& x, const Tensor& y) { return torch::binary_cross_entropy_with_logits(x, y); }},
      {"kl div", [](const Tensor& x, const Tensor& y) { return torch::kl_div(x.log_softmax(-1), y); }},
      {"cross entropy", [](const Tensor& x, const Tensor& y) { return torch::cross_entropy_loss(x, y); }}};
  for (const auto& [name, loss] : losses) {
    EXPECT_NO_THROW(loss(output_in(torch::kBFloat16), torch::rand({4, 5})).backward()) << name;
  }
}

TEST(ExplainBackward, OtherErrorsStayAsTheyAre) {
  auto x = torch::ones({2}).requires_grad_();
  const auto y = x * 2;
  y.register_hook([](const Tensor&) { TORCH_CHECK(false, "thrown in a hook"); });
  const auto message = error_of([&] { y.sum().backward(); });
  EXPECT_EQ(message.find("in backward:"), std::string::npos) << message;
}

} // namespace
} // namespace tessera::testing::explain_backward_test
