// Plans: what they name, what they refuse, and where the parameters lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/tensor/plan_lines.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/matchers.h>

#include <string>

namespace tessera::testing::plan_test {
namespace {

namespace nn = torch::nn;

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

Placements placements_of(const torch::Tensor& tensor) { return DTensor(tensor).placements(); }

std::string error_of_plan(nn::Module& module, const ParallelPlan& plan) {
  return error_of([&] { parallelize(module, tensor_mesh(), plan); });
}

TEST(ParallelPlan, WildcardsStandForAPartOfAName) {
  using internal::parallel::matches;
  EXPECT_TRUE(matches("blocks.*.up", "blocks.12.up"));
  EXPECT_TRUE(matches("blocks.[0-3].*", "blocks.2.up"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_FALSE(matches("blocks.*", "blocks.0.up"));
  EXPECT_FALSE(matches("*", "blocks.0"));
  EXPECT_FALSE(matches("*", ""));
  EXPECT_FALSE(matches("blocks.[0-3].*", "blocks.4.up"));
}

TEST(ParallelPlan, PlacesParameters) {
  const auto n = world_size();
  torch::manual_seed(5); // alike on all ranks
  nn::Sequential model(nn::Linear(4, 3 * n), nn::Linear(3 * n, 4), nn::LayerNorm(nn::LayerNormOptions({4})),
                       nn::Embedding(7, 4 * n), nn::Conv2d(2 * n, 3 * n, 3), nn::Embedding(3 * n, 4));
  const auto before = whole_of(model->named_parameters()["0.weight"]).clone();
  parallelize(*model, tensor_mesh(),
              {{"0", Colwise{}}, {"1", Rowwise{}}, {"3", Colwise{}}, {"4", Rowwise{}}, {"5", VocabParallel{}}});
  const auto parameters = model->named_parameters();
  EXPECT_EQ(placements_of(parameters["0.weight"]), Placements{Shard{0}});
  EXPECT_EQ(placements_of(parameters["0.bias"]), Placements{Shard{0}});
  EXPECT_EQ(placements_of(parameters["1.weight"]), Placements{Shard{1}});
  EXPECT_EQ(placements_of(parameters["1.bias"]), Placements{Replicate{}});
  EXPECT_EQ(placements_of(parameters["2.weight"]), Placements{Replicate{}});
  EXPECT_EQ(placements_of(parameters["3.weight"]), Placements{Shard{1}});
  EXPECT_EQ(placements_of(parameters["4.weight"]), Placements{Shard{1}});
  EXPECT_EQ(placements_of(parameters["4.bias"]), Placements{Replicate{}});
  EXPECT_EQ(placements_of(parameters["5.weight"]), Placements{Shard{0}}) << "an embedding's rows";
  EXPECT_TENSORS_EQUAL(whole_of(parameters["0.weight"]), before);
  EXPECT_TRUE(parameters["0.weight"].requires_grad());
  EXPECT_TRUE(parameters["0.weight"].is_leaf());
}

TEST(ParallelPlan, ALineThatNamesNothingNamesTheNearest) {
  auto model = seeded_gpt(small_gpt());
  EXPECT_THAT(error_of_plan(*model, {{"blocks.*.expandd", Colwise{}}}),
              ::testing::HasSubstr("the plan names 'blocks.*.expandd' (Colwise), but no module has such a name; the nearest is "
                                   "'blocks.0.expand'"));
  EXPECT_FALSE(is_dtensor(model->parameters()[0])); // nothing has changed
}

TEST(ParallelPlan, AStyleHasToFitItsModule) {
  nn::Sequential model(nn::LayerNorm(nn::LayerNormOptions({4})), nn::GRU(4, 4), nn::Conv2d(nn::Conv2dOptions(4, 4, 3).groups(2)),
                       nn::ReLU());
  EXPECT_THAT(error_of_plan(*model, {{"0", Colwise{}}}), ::testing::HasSubstr("it has no weight of output and input features"));
  EXPECT_THAT(error_of_plan(*model, {{"0", Rowwise{}}}), ::testing::HasSubstr("is planned as Rowwise, but"));
  EXPECT_THAT(error_of_plan(*model, {{"1", Colwise{}}}),
              ::testing::HasSubstr("a recurrent layer reads its output at every step"));
  EXPECT_THAT(error_of_plan(*model, {{"2", Colwise{}}}), ::testing::HasSubstr("its channels are in 2 groups"));
  EXPECT_THAT(error_of_plan(*model, {{"3", PrepareInput{Shard{1}}}}), ::testing::HasSubstr("it has no parameters of its own"));
  EXPECT_THAT(error_of_plan(*model, {{"0", VocabParallel{}}}), ::testing::HasSubstr("it has no table with a row a token"));
}

TEST(ParallelPlan, AParameterIsPlannedOnce) {
  nn::Sequential model(nn::Linear(12, 12));
  EXPECT_THAT(
      error_of_plan(*model, {{"0", Colwise{}}, {"*", Rowwise{}}}),
      ::testing::HasSubstr("the parameter 0.weight is planned twice: as Shard(0) by '0', and as Shard(1) by '*' (Rowwise)"));
  EXPECT_EQ(error_of_plan(*model, {{"0", Colwise{}}, {"0", PrepareOutput{Replicate{}}}}), "no error");
  EXPECT_THAT(error_of_plan(*model, {{"0", Colwise{}}}), ::testing::HasSubstr("is parallel already"));
}

TEST(ParallelPlan, SizesHaveToDivide) {
  if (world_size() == 1) GTEST_SKIP() << "one rank divides all";
  nn::Sequential model(nn::Linear(5, 25), nn::Linear(5, 15));
  EXPECT_THAT(
      error_of_plan(*model, {{"0", Colwise{}}}),
      ::testing::HasSubstr("dim 0 of the parameter 0.weight [25, 5] is 25, which the " + std::to_string(world_size()) +
                           " ranks of " + tensor_mesh().to_string() + " do not divide; numbers of ranks that do: 1, 5, 25"));
  EXPECT_THAT(error_of_plan(*model, {{"1", Colwise{.packed = 3}}}), ::testing::HasSubstr("15, 3 blocks of 5, which the"));
  EXPECT_THAT(error_of_plan(*model, {{"1", Colwise{.packed = 2}}}), ::testing::HasSubstr("are not 2 blocks of one size"));
}

/// 12 heads of 3 features divide among ranks that 36 features do too.
TEST(ParallelPlan, HeadsHaveToDivide) {
  const auto n = world_size();
  nn::Sequential model(nn::Linear(12, 36), nn::Linear(12, 3 * 36), nn::MultiheadAttention(12, 3),
                       nn::LayerNorm(nn::LayerNormOptions({4})));
  const auto ranks = std::to_string(n) + " ranks of " + tensor_mesh().to_string();
  EXPECT_THAT(error_of_plan(*model, {{"0", Colwise{.heads = 5}}}),
              ::testing::HasSubstr("its 36 output features are not 5 heads"));
  EXPECT_THAT(error_of_plan(*model, {{"0", KeyHeads{0}}}), ::testing::HasSubstr("its 36 output features are not 0 heads"));
  EXPECT_THAT(error_of_plan(*model, {{"3", KeyHeads{2}}}),
              ::testing::HasSubstr("it is no projection of output and input features"));
  if (n == 2 || n == 4) {
    EXPECT_THAT(
        error_of_plan(*model, {{"0", Colwise{.heads = 9}}}),
        ::testing::HasSubstr("the module '0' (torch::nn::LinearImpl) is planned as Colwise(heads 9), but its 9 heads are not "
                             "divided by the " +
                             ranks + "; numbers of ranks that do: 1, 3, 9"));
    EXPECT_THAT(error_of_plan(*model, {{"1", Colwise{.packed = 3, .heads = 9}}}),
                ::testing::HasSubstr("its 9 heads are not divided by the " + ranks));
    EXPECT_THAT(error_of_plan(*model, {{"2", Colwise{}}}), ::testing::HasSubstr("its 3 heads are not divided by the " + ranks));
  }
  EXPECT_FALSE(is_dtensor(model->parameters()[0])); // nothing has changed
  EXPECT_EQ(error_of_plan(*model, {{"0", Colwise{.heads = 12}}, {"1", KeyHeads{1}}}), "no error");
  EXPECT_EQ(placements_of(model->parameters()[0]), Placements{Shard{0}});
  EXPECT_EQ(placements_of(model->parameters()[2]), n == 1 ? Placements{Shard{0}} : Placements{Replicate{}});
}

TEST(ParallelPlan, ComesBeforeFullyShard) {
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "tp"});
  nn::Linear model(12, 12);
  fully_shard(model, mesh["dp"]);
  EXPECT_THROWS_WITH(parallelize(*model, mesh["tp"], {{"", Colwise{}}}),
                     "the parameter weight is sharded by fully_shard already: call parallelize before it");
  nn::Linear other(12, 12);
  EXPECT_THROWS_WITH(parallelize(*other, mesh, {{"", Colwise{}}}), "the mesh must have one dim");
}

TEST(ParallelPlan, AnActivationMeetsOneMesh) {
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size()}, {"other", "tp"});
  nn::Linear model(12, 12);
  parallelize(*model, mesh["tp"], {{"", Colwise{}}});
  const auto x = from_local(torch::ones({2, 12}), mesh, {Replicate{}, Replicate{}});
  EXPECT_THAT(error_of([&] { model->forward(x); }),
              ::testing::AllOf(::testing::HasSubstr("beside the parameter weight (rank "),
                               ::testing::HasSubstr("): the activation is on " + mesh.to_string() + ", the parameter on " +
                                                    mesh["tp"].to_string())));
}

TEST(ParallelPlan, PrintsItself) {
  EXPECT_EQ(to_string(gpt_plan(true)),
            "token_embedding: VocabParallel(output Shard(1))\n"
            "blocks.*.attention.qkv: Colwise(packed 3)\n"
            "blocks.*.attention.projection: Rowwise(output Shard(1))\n"
            "blocks.*.expand: Colwise\n"
            "blocks.*.contract: Rowwise(output Shard(1))\n"
            "blocks.*.*_norm: Sequence(dim 1)\n"
            "norm: Sequence(dim 1)\n");
}

TEST(ParallelPlan, LeavesActivationsAloneUnderStrictSharding) {
  if (world_size() == 1) GTEST_SKIP() << "one rank moves nothing";
  nn::Linear model(12, 12);
  parallelize(*model, tensor_mesh(), {{"", Colwise{}}});
  const auto y = model->forward(torch::ones({2, 12}));
  EXPECT_EQ(placements_of(y), Placements{Shard{1}});
  EXPECT_EQ(placements_of(torch::softmax(y, 0)), Placements{Shard{1}});
  EXPECT_EQ(placements_of(torch::flip(y, {1})), Placements{Replicate{}}); // whole, never split by rows
  const StrictSharding strict;
  EXPECT_THROWS_WITH(torch::flip(y, {1}), "the plan of `parallelize` does not say so");
}

TEST(ParallelPlan, InputsAndOutputsGoWhereTheStylesSay) {
  const auto n = world_size();
  torch::manual_seed(5); // alike on all ranks
  nn::Sequential model(nn::Linear(4, 2 * n), nn::Linear(2 * n, 4), nn::Linear(4, 4));
  nn::Sequential twin(nn::Linear(4, 2 * n), nn::Linear(2 * n, 4), nn::Linear(4, 4));
  for (size_t i = 0; i < 6; ++i) {
    const torch::NoGradGuard no_grad;
    twin->parameters()[i].copy_(model->parameters()[i]);
  }
  parallelize(*model, tensor_mesh(),
              {{"0", Colwise{.output = Replicate{}}},
               {"1", Rowwise{.output = Shard{0}}},
               {"2", PrepareInput{Replicate{}}},
               {"2", PrepareOutput{Shard{0}}}});
  const auto x = torch::arange(4.0 * 4 * n).view({4 * n, 4}).div(16).requires_grad_(),
             other = x.detach().clone().requires_grad_();
  const auto first = model[0]->as<nn::Linear>()->forward(x);
  EXPECT_EQ(placements_of(first), Placements{Replicate{}});
  const auto second = model[1]->as<nn::Linear>()->forward(first);
  EXPECT_EQ(placements_of(second), Placements{Shard{0}});
  const auto third = model[2]->as<nn::Linear>()->forward(second);
  EXPECT_EQ(placements_of(third), Placements{Shard{0}});
  EXPECT_TENSORS_CLOSE(whole_of(third), twin->forward(other), 1e-5);
  third.square().sum().backward();
  twin->forward(other).square().sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), other.grad(), 1e-5);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_TENSORS_CLOSE(whole_of(model->parameters()[i].grad()), twin->parameters()[i].grad(), 1e-5);
}

} // namespace
} // namespace tessera::testing::plan_test
