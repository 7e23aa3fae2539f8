#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/equivalence/case_model.h>
#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {

/// full, hybrid and no-shard, each with both layouts.
std::vector<Strategy> equivalence_strategies();

/// Shards the model's units, then the model.
void shard_case(CaseModel& model, const Strategy& strategy);

/// The same weights with every call.
template <typename Model>
std::shared_ptr<Model> make_case() {
  torch::manual_seed(7);
  return std::make_shared<Model>();
}

/// The same where the unsharded model computes.
template <typename Model>
std::shared_ptr<Model> make_twin() {
  auto twin = make_case<Model>();
  twin->to(twin_device());
  return twin;
}

template <typename Model>
std::shared_ptr<Model> sharded_case(const Strategy& strategy) {
  auto model = make_case<Model>();
  shard_case(*model, strategy);
  return model;
}

/// For `TrainingDifference::autocast`: bf16 rounds a number that differs in its last bits to a neighbour.
constexpr double kToleranceOfAutocast = 2e-2;

/// What a training of one case under one strategy came to.
struct TrainingDifference {
  double loss = 0;               ///< largest difference of a step's loss from the unsharded model's
  double evaluation = 0;         ///< of a loss between and after the steps, relative where it is above 1, without grad mode
  double autocast = 0;           ///< the same in an autocast to bf16
  double parameters = 0;         ///< largest difference of a parameter or buffer after the last step
  std::string worst;             ///< the name of that one
  int64_t extra_all_gathers = 0; ///< in the last step, beyond the expected count
  int64_t leaked_bytes = 0;      ///< unsharded, after `reshard()`
  int64_t leaked_graphs = 0;     ///< alive after their iteration
  int64_t leaked_groups = 0;     ///< alive after the model is gone
};

/// Trains 5 steps unsharded on the data of all ranks, and sharded on this rank's.
TrainingDifference compare_training(const EquivalenceCase& test_case, const Strategy& strategy);

/// A test parameter: a case under a strategy.
struct EquivalenceParam {
  EquivalenceCase test_case;
  Strategy strategy;
};
std::ostream& operator<<(std::ostream& out, const EquivalenceParam& param);
std::vector<EquivalenceParam> with_all_strategies(const std::vector<EquivalenceCase>& cases);
/// `linear_without_bias_full_ragged`
std::string param_name(const ::testing::TestParamInfo<EquivalenceParam>& info);
/// Runs the case, records its figures in gtest's report, and expects equality within 1e-5, no extra all-gather and no leak.
void expect_equivalent(const EquivalenceParam& param);

} // namespace tessera::testing
