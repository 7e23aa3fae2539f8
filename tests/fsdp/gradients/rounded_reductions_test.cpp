// What is rounded, and when, where gradients are added and reduced in half precision.
#include <gtest/gtest.h>

#include <vector>

#include <tessera/activations/recompute.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::rounded_reductions_test {
namespace {

using torch::Tensor;

constexpr int64_t kBatches = 3;

/// The gradient of one micro-batch of one rank: random numbers of `dtype` around 4, of which a sum needs rounding.
Tensor gradient_of(int64_t rank, int64_t batch, torch::IntArrayRef sizes, torch::Dtype dtype) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * rank + batch));
  return (torch::randn(sizes, generator) + 4).to(dtype);
}

/// In the order of the ranks, in fp32, rounded once.
Tensor mean(const std::vector<Tensor>& values) {
  auto sum = values[0].to(torch::kFloat);
  for (size_t i = 1; i < values.size(); ++i) sum = sum + values[i].to(torch::kFloat);
  return (sum / static_cast<double>(values.size())).to(values[0].scalar_type());
}

/// Inside the last mesh dim, and where there are two, then between their groups.
Tensor reduced(const std::vector<Tensor>& of_ranks, const DeviceMesh& mesh) {
  if (mesh.ndim() == 1) return mean(of_ranks);
  std::vector<Tensor> of_groups;
  for (int64_t group = 0; group < mesh.size(0); ++group) {
    const auto begin = of_ranks.begin() + group * mesh.size(1);
    of_groups.push_back(mean({begin, begin + mesh.size(1)}));
  }
  return mean(of_groups);
}

/// Whole gradients wait for the last backward, and are added in the dtype of the reduction. Others are reduced in each backward,
/// and added in the dtype of the parameter.
Tensor expected_gradient(const Strategy& strategy, torch::IntArrayRef sizes, torch::Dtype dtype) {
  const bool waits = strategy.replicates || strategy.options.strategy == tessera::Strategy::kZero1;
  std::vector<Tensor> added(static_cast<size_t>(world_size()));
  auto sum = torch::zeros(sizes);
  for (int64_t batch = 0; batch < kBatches; ++batch) {
    std::vector<Tensor> of_ranks;
    for (size_t rank = 0; rank < added.size(); ++rank) {
      of_ranks.push_back(gradient_of(static_cast<int64_t>(rank), batch, sizes, dtype));
      added[rank] = added[rank].defined() ? added[rank] + of_ranks.back() : of_ranks.back();
    }
    if (!waits) sum = sum + reduced(of_ranks, strategy.mesh()).to(torch::kFloat);
  }
  return waits ? reduced(added, strategy.mesh()).to(torch::kFloat) : sum;
}

struct Weights : torch::nn::Module {
  Weights() {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1}, {0, 2}, {7}})
      weights.push_back(register_parameter("weight" + std::to_string(weights.size()), torch::zeros(sizes)));
  }
  std::vector<Tensor> weights;
};

void backward_of(Weights& model, int64_t batch, torch::Dtype dtype) {
  const auto run = [&](const Tensor& one) {
    auto sum = torch::zeros({}, torch::device(test_device()).dtype(torch::kFloat));
    for (const auto& weight : model.weights) {
      const auto gradient = gradient_of(world_rank(), batch, weight.sizes(), dtype).to(test_device());
      sum = sum + (weight * gradient * one).to(torch::kFloat).sum();
    }
    return sum;
  };
  const auto one = torch::ones({}, torch::device(test_device()).dtype(dtype)).requires_grad_();
  recompute(run, one).backward();
}

TEST(RoundedReductions, AddMicroBatchesInTheReduceDtypeWhereWholeGradientsWaitAndElseInTheParametersOwn) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    for (auto strategy : strategies()) {
      SCOPED_TRACE(c10::str(strategy.name, " in ", dtype));
      strategy.options.mixed_precision.param_dtype = dtype;
      Weights model;
      auto handle = strategy.replicates ? replicate(model, strategy.mesh(), strategy.options)
                                        : fully_shard(model, strategy.mesh(), strategy.options);
      for (int64_t batch = 0; batch < kBatches; ++batch) {
        handle.set_is_last_backward(batch + 1 == kBatches);
        backward_of(model, batch, dtype);
      }
      for (const auto& weight : model.weights)
        EXPECT_TENSORS_EQUAL(full(weight.grad()), expected_gradient(strategy, weight.sizes(), dtype));
    }
  }
}

} // namespace
} // namespace tessera::testing::rounded_reductions_test
