// What goes from layer to layer, taken apart and put together.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/stages/value_tree.h>

#include <tessera/tests/support/matchers.h>

#include <string>
#include <tuple>
#include <unordered_map>

namespace tessera::testing::value_tree_test {
namespace {

using internal::pipeline::flatten, internal::pipeline::unflatten, internal::pipeline::with_tensors;

TEST(ValueTree, ComesBackAsItWas) {
  using Inner = std::tuple<std::vector<torch::Tensor>, std::optional<torch::Tensor>, bool>;
  using Tree = std::tuple<torch::Tensor, int64_t, double, std::string, Inner, std::unordered_map<std::string, torch::Tensor>,
                          std::vector<int64_t>, std::vector<double>>;
  const auto x = torch::ones({2, 3}), y = torch::zeros({0});
  const Tree tree{x, -7, 0.1, "a]s1:b", Inner{{x, y}, std::nullopt, true}, {{"mask", y}}, {1, 2}, {}};
  const auto flat = flatten(tree, "the test's value");
  EXPECT_EQ(flat.tensors.size(), 4U);
  EXPECT_EQ(flat.numbers.size(), 5U);
  const auto back = unflatten(flat).to<Tree>();
  EXPECT_TRUE(std::get<0>(back).is_same(x));
  EXPECT_EQ(std::get<1>(back), -7);
  EXPECT_EQ(std::get<2>(back), 0.1);
  EXPECT_EQ(std::get<3>(back), "a]s1:b");
  EXPECT_TRUE(std::get<0>(std::get<4>(back))[1].is_same(y));
  EXPECT_FALSE(std::get<1>(std::get<4>(back)).has_value());
  EXPECT_TRUE(std::get<2>(std::get<4>(back)));
  EXPECT_TRUE(std::get<5>(back).at("mask").is_same(y));
  EXPECT_EQ(std::get<6>(back), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(std::get<7>(back).empty());
  EXPECT_EQ(flatten(unflatten(flat), "").structure, flat.structure);
}

TEST(ValueTree, HoldsOneTensorOrNone) {
  EXPECT_EQ(flatten(torch::ones({1}), "").structure, "T");
  EXPECT_EQ(flatten(c10::IValue(), "").structure, "N");
  EXPECT_FALSE(unflatten(flatten(torch::Tensor(), "")).toTensor().defined());
  const auto doubled = with_tensors(std::vector<torch::Tensor>{torch::ones({1})}, [](const torch::Tensor& x) { return 2 * x; });
  EXPECT_TENSORS_EQUAL(doubled.toTensorVector()[0], torch::full({1}, 2.0F));
}

TEST(ValueTree, NamesWhatCannotBeSent) {
  EXPECT_THROWS_WITH(flatten(c10::complex<double>(1, 2), "the output of stage 1"), "the output of stage 1 has a ComplexDouble");
}

} // namespace
} // namespace tessera::testing::value_tree_test
