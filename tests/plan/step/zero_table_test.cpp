// The table of ZeRO's paper (arXiv:1910.02054, figure 1): 7.5 B parameters on 64 ranks, Adam in mixed precision, K = 12.
#include <gtest/gtest.h>

#include <tessera/plan/prediction.h>

#include <tessera/tests/plan/test_models.h>

namespace tessera::testing::zero_table_test {
namespace {

constexpr int64_t kWidth = 5000, kLayers = 300, kRanks = 64; // 300 x 5000 x 5000 = 7.5e9

PlannedModel large() {
  const auto make = [] {
    torch::nn::Sequential layers;
    for (int64_t i = 0; i < kLayers; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    return layers;
  };
  return planned::sequence("7.5 B", make, {kWidth});
}

TEST(ZeroTable, IsReproduced) {
  Machine machine{.hosts = 4, .ranks_a_host = 16};
  machine.memory = int64_t{32} << 30;
  machine.fp32_flops = 1e13;
  machine.memory_bandwidth = 1e12;
  machine.in_host = machine.between_hosts = {1e-5, 1e-11};
  struct Row {
    tessera::Strategy strategy;
    double gigabytes;
  };
  for (const auto& row : {Row{tessera::Strategy::kNoShard, 120}, Row{tessera::Strategy::kZero1, 31.4},
                          Row{tessera::Strategy::kZero2, 16.6}, Row{tessera::Strategy::kFullShard, 1.9}}) {
    PlanSettings settings{.strategy = row.strategy, .precision = PlanPrecision::kDeepSpeed, .max_grad_norm = 0};
    (row.strategy == tessera::Strategy::kNoShard ? settings.mesh.replicate : settings.mesh.shard) = kRanks;
    // Gradients of a single micro-batch would be reduced layer by layer, under ZeRO-1 too.
    if (row.strategy == tessera::Strategy::kZero1) settings.accumulation = 2;
    const auto prediction = predict(large(), machine, settings);
    EXPECT_EQ(prediction.parameters, 7'500'000'000);
    // The paper counts model states alone, and gradients in 16 bits. Here the optimizer takes them in fp32, as its weights are,
    // and a layer is gathered and its gradient reduced.
    EXPECT_NEAR(static_cast<double>(prediction.peak()) / 1e9, row.gigabytes, 0.03 * row.gigabytes + 0.3)
        << prediction.to_string();
  }
}

} // namespace
} // namespace tessera::testing::zero_table_test
