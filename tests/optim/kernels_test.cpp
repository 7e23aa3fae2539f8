// The kernels of steps, beside what they stand for: the same numbers from ATen's operators, or one number after another.
#include <gmock/gmock.h>
#include <tessera/dtensor/api.h>

#include <cmath>

#include <tessera/optim/kernels/flat_runs.h>
#include <tessera/optim/kernels/flat_values.h>
#include <tessera/optim/kernels/rounded_adam.h>
#include <tessera/optim/parts/shared_sums.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/optim/layouts.h>
#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::kernels_test {
namespace {

at::Generator generator_of(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

TEST(FlatRuns, SayWhereEachElementLies) {
  for (const auto& [mesh, placements] : layouts(37, 24)) {
    SCOPED_TRACE(to_string(placements));
    const auto whole = torch::arange(37 * 24, torch::TensorOptions(mesh.device()).dtype(torch::kLong)).view({37, 24});
    const auto tensor = distribute_tensor(whole, mesh, placements);
    const auto part = internal::part_of(tensor).cpu().contiguous().view({-1});
    int64_t seen = 0;
    for (const auto& run : internal::cut_runs(internal::flat_runs(tensor), 16)) {
      EXPECT_LE(run.length, 16);
      EXPECT_EQ(run.position / 16, (run.position + run.length - 1) / 16);
      EXPECT_TRUE(torch::equal(part.narrow(0, run.offset, run.length), torch::arange(run.position, run.position + run.length)));
      seen += run.length;
    }
    EXPECT_EQ(seen, part.numel());
  }
}

float value_of_bits(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

TEST(FlatValues, AddUpSquaresInDouble) {
  torch::manual_seed(3);
  std::vector<at::Tensor> tensors;
  std::vector<double> weights;
  double expected = 0;
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    for (const int64_t numel : {0, 1, 15, 16, 17, 1000, 16384, 40001}) {
      tensors.push_back(torch::randn({numel}).to(dtype));
      weights.push_back(1.0 / static_cast<double>(tensors.size()));
      EXPECT_TRUE(internal::is_flat(tensors.back()));
      expected += weights.back() * tensors.back().to(torch::kDouble).square().sum().item<double>();
    }
  }
  const double sum = internal::weighted_squares(tensors, weights);
  EXPECT_NEAR(sum, expected, 1e-12 * expected);
  const int threads = at::get_num_threads();
  at::set_num_threads(threads == 1 ? 2 : 1);
  EXPECT_EQ(internal::weighted_squares(tensors, weights), sum) << "with another number of threads";
  at::set_num_threads(threads);
  EXPECT_EQ(internal::weighted_squares({}, {}), 0);
  EXPECT_GT(internal::weighted_squares({torch::full({2}, 3e38F)}, {1}), 1e76) << "no square of a float overflows";
  EXPECT_TRUE(std::isnan(internal::weighted_squares({torch::full({3}, NAN)}, {1})));
}

TEST(FlatValues, AreMultipliedAsATensorIs) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    for (const int64_t numel : {0, 1, 17, 40001}) {
      const auto tensor = torch::randn({numel}).to(dtype), expected = tensor * 0.3;
      const auto version = tensor._version();
      internal::multiply_flat({tensor}, 0.3);
      EXPECT_TRUE(torch::equal(tensor, expected)) << dtype << ' ' << numel;
      EXPECT_GT(tensor._version(), version);
    }
  }
  const auto matrix = torch::ones({4, 6});
  for (const auto& other : {matrix.narrow(1, 0, 3), matrix.to(torch::kInt), matrix.to(torch::kComplexFloat), matrix.to_sparse(),
                            torch::ones({1}).expand({5}), matrix.to(torch::kMeta)})
    EXPECT_FALSE(internal::is_flat(other)) << other.options();
  EXPECT_TRUE(internal::is_flat(matrix.t()));
}

TEST(StochasticRounding, KeepsTheMean) {
  for (const float value : {1.0F + 1.0F / 512, -3.1F, 1e-20F, 1.0F, 0.0F, -0.0F, 3e38F}) {
    double sum = 0;
    for (uint32_t random = 0; random < 65536; ++random) {
      const auto rounded = value_of_bits(internal::round_stochastically(value, random));
      EXPECT_LE(std::abs(rounded - value), std::abs(value) / 128);
      sum += rounded;
    }
    EXPECT_NEAR(sum / 65536, value, std::abs(value) * 1e-6);
  }
  constexpr auto kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(value_of_bits(internal::round_stochastically(-kInfinity, 65535)), -kInfinity);
  for (const uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFC00000U})
    EXPECT_TRUE(std::isnan(value_of_bits(internal::round_stochastically(std::bit_cast<float>(bits), 65535))));
}

TEST(StochasticRounding, TakesNumbersThatLookUniform) {
  std::vector<int64_t> low(16), high(16);
  constexpr int64_t kPositions = 1 << 16;
  for (int64_t position = 0; position < kPositions; ++position) {
    const auto bits = internal::rounding_bits(1, 2, position + (int64_t{1} << 33));
    ++low[bits & 15];
    ++high[bits >> 28];
  }
  for (const auto* counts : {&low, &high}) {
    for (const auto count : *counts) EXPECT_NEAR(static_cast<double>(count), kPositions / 16.0, 6 * std::sqrt(kPositions / 16.0));
  }
  EXPECT_NE(internal::rounding_bits(1, 2, 3), internal::rounding_bits(2, 2, 3));
  EXPECT_NE(internal::rounding_bits(1, 2, 3), internal::rounding_bits(1, 3, 3));
  EXPECT_NE(internal::rounding_bits(1, 2, 3), internal::rounding_bits(1, 2, 3 + (int64_t{1} << 32)));
}

template <typename Optimizer, typename State, typename Options>
void expect_rounded_steps(const Options& options, bool decoupled) {
  const auto generator = generator_of(9);
  auto parameter = torch::randn({700}, generator, torch::kDouble).requires_grad_();
  std::vector<double> w(700);
  std::vector<float> m(700), v(700);
  for (size_t i = 0; i < w.size(); ++i) w[i] = parameter[static_cast<int64_t>(i)].template item<double>();
  Optimizer optimizer({parameter}, options);
  optimizer.keep_moments_in(MomentDtype::kBFloat16, 17);
  for (int64_t step = 1; step <= 50; ++step) {
    parameter.mutable_grad() = torch::randn({700}, generator, torch::kDouble);
    const auto* gradients = parameter.grad().template data_ptr<double>();
    for (size_t i = 0; i < w.size(); ++i) {
      if (decoupled) w[i] *= 1 - options.lr() * options.weight_decay();
      const double g = gradients[i] + (decoupled ? 0 : options.weight_decay() * w[i]);
      const double average = 0.9 * m[i] + 0.1 * g, square = 0.999 * v[i] + 0.001 * g * g;
      w[i] -= options.lr() * average / (1 - std::pow(0.9, step)) / (std::sqrt(square / (1 - std::pow(0.999, step))) + 1e-8);
      const auto random = internal::rounding_bits(17, step, static_cast<int64_t>(i));
      m[i] = value_of_bits(internal::round_stochastically(static_cast<float>(average), random & 0xFFFF));
      v[i] = value_of_bits(internal::round_stochastically(static_cast<float>(square), random >> 16));
    }
    optimizer.step();
  }
  for (size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(parameter[static_cast<int64_t>(i)].template item<double>(), w[i], 1e-9);
  const auto& state = static_cast<const State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  EXPECT_EQ(state.exp_avg().scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(state.exp_avg_sq().to(torch::kFloat), torch::tensor(v)));
}

TEST(MomentsInBFloat16, AreRoundedAsTheFormulasSay) {
  expect_rounded_steps<FusedAdamW, torch::optim::AdamWParamState>(torch::optim::AdamWOptions(0.01).weight_decay(0.1), true);
  expect_rounded_steps<FusedAdam, torch::optim::AdamParamState>(torch::optim::AdamOptions(0.01).weight_decay(0.1), false);
}

TEST(MomentsInBFloat16, AreTheSameOnAnyMesh) {
  if (!tests_the_cpu()) GTEST_SKIP() << "moments in bf16 are on the CPU";
  for (const auto& [mesh, placements] : layouts(37, 24)) {
    SCOPED_TRACE(to_string(placements));
    const auto generator = generator_of(3);
    auto whole = torch::randn({37, 24}, generator).requires_grad_();
    auto parts = distribute_tensor(whole.detach().clone(), mesh, placements).requires_grad_();
    FusedAdamW alone({whole}, 0.01), sharded({parts}, 0.01);
    for (auto* each : {&alone, &sharded}) each->keep_moments_in(MomentDtype::kBFloat16, 4);
    for (int step = 0; step < 4; ++step) {
      whole.mutable_grad() = torch::randn({37, 24}, generator);
      parts.mutable_grad() = distribute_tensor(whole.grad(), mesh, placements);
      alone.step();
      sharded.step();
    }
    EXPECT_TRUE(torch::allclose(DTensor(parts).full_tensor(), whole.detach(), 1e-6, 1e-7));
    const auto moment = [](torch::optim::Optimizer& optimizer, const at::Tensor& of) {
      return static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(of.unsafeGetTensorImpl())).exp_avg();
    };
    EXPECT_TRUE(torch::equal(DTensor(moment(sharded, parts)).full_tensor(), moment(alone, whole)));
  }
}

TEST(MomentsInBFloat16, GoOnAfterAResume) {
  if (!tests_the_cpu()) GTEST_SKIP() << "moments in bf16 are on the CPU";
  const auto trained = [](TrainedModel& model, FusedAdamW& optimizer, const std::string& strategy, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) train_step(model, optimizer, strategy, step);
  };
  for (const std::string strategy : {"full-ragged", "full-per-parameter"}) {
    TrainedModel saved(1), loaded(2);
    shard(saved, "full-ragged");
    shard(loaded, strategy);
    FusedAdamW optimizer(saved.parameters(), 0.01), resumed(loaded.parameters(), 0.01);
    for (auto* each : {&optimizer, &resumed}) each->keep_moments_in(MomentDtype::kBFloat16, 5);
    trained(saved, optimizer, "full-ragged", 0, 3);
    const auto whole = state_dict(saved, optimizer, {.full_state_dict = true});
    auto target = state_dict(loaded, resumed);
    load_state_dict(target, whole);
    trained(saved, optimizer, "full-ragged", 3, 5);
    trained(loaded, resumed, strategy, 3, 5);
    const auto others = saved.named_parameters();
    for (const auto& item : loaded.named_parameters()) {
      const auto got = whole_tensor(item.value()), expected = whole_tensor(others[item.key()]);
      if (strategy == "full-ragged") EXPECT_TRUE(torch::equal(got, expected)) << item.key();
      EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5)) << item.key();
    }
  }
}

TEST(MomentsInBFloat16, AreAnErrorWithoutTheOption) {
  auto parameter = torch::ones({5}).requires_grad_();
  parameter.mutable_grad() = torch::ones({5});
  FusedAdamW optimizer({parameter}, torch::optim::AdamWOptions(0.01));
  optimizer.step(); // moments in float are rounded in the next step
  optimizer.keep_moments_in(MomentDtype::kBFloat16);
  optimizer.step();
  optimizer.keep_moments_in(MomentDtype::kAsParameter);
  EXPECT_THROWS_WITH(optimizer.step(), "a moment of a parameter of shape [5] is BFloat16: call keep_moments_in");
  FusedAdamW largest({parameter}, torch::optim::AdamWOptions(0.01).amsgrad(true));
  largest.keep_moments_in(MomentDtype::kBFloat16);
  EXPECT_THROWS_WITH(largest.step(), "amsgrad with moments in bf16");
}

} // namespace
} // namespace tessera::testing::kernels_test
