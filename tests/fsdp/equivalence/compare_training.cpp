#include "compare_training.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing {

namespace {

constexpr int64_t kSteps = 5;
constexpr double kTolerance = 1e-5;

std::shared_ptr<CaseModel> build(const EquivalenceCase& test_case) {
  torch::manual_seed(7);
  return test_case.make();
}

double largest_difference(const torch::Tensor& got, const torch::Tensor& expected) {
  EXPECT_TRUE(expected.isfinite().all().item<bool>()) << "the unsharded model diverges";
  if (expected.numel() == 0) return 0;
  const auto dtype = expected.is_complex() ? torch::kComplexDouble : torch::kDouble;
  const auto difference = (got.to(dtype) - expected.to(dtype)).abs().max().item<double>();
  return std::isnan(difference) ? INFINITY : difference;
}

void compare_state(const torch::nn::Module& got, const torch::nn::Module& expected, TrainingDifference& difference) {
  const torch::NoGradGuard no_grad;
  const auto compare = [&](const std::string& name, const torch::Tensor& a, const torch::Tensor& b) {
    const double found = largest_difference(a, b);
    if (found > difference.parameters) difference.worst = name;
    difference.parameters = std::max(difference.parameters, found);
  };
  const auto parameters = expected.named_parameters();
  for (const auto& item : got.named_parameters()) compare(item.key(), full(item.value()), parameters[item.key()].cpu());
  const auto buffers = expected.named_buffers();
  for (const auto& item : got.named_buffers()) compare(item.key(), item.value().cpu(), buffers[item.key()].cpu());
}

double mean_of_ranks(double value) { return mean_over_ranks(torch::tensor(value, torch::kDouble)).item<double>(); }

/// How a model is evaluated.
enum class Mode { kNoGrad, kInference, kAutocast };

/// Devices differ in what autocast casts: an unsharded model goes there for it.
class OnTestDevice {
 public:
  explicit OnTestDevice(CaseModel& model)
      : model_(model), home_(model.device()), moves_(model.can_move() && home_ != test_device()) {
    if (moves_) model_.to(test_device());
  }
  ~OnTestDevice() {
    if (moves_) model_.to(home_);
  }
  OnTestDevice(const OnTestDevice&) = delete;
  OnTestDevice& operator=(const OnTestDevice&) = delete;

 private:
  CaseModel& model_;
  const c10::Device home_;
  const bool moves_;
};

/// The loss of rank `rank`'s input in evaluation; nothing where the model takes gradients in its forward, or where autocast has
/// no kernel for it.
std::optional<double> evaluate(CaseModel& model, int64_t step, int64_t rank, Mode mode) {
  const bool trained = model.is_training();
  model.eval();
  std::optional<double> loss;
  const auto message = error_of([&] {
    const torch::NoGradGuard no_grad;
    std::optional<c10::InferenceMode> inference;
    std::optional<OnTestDevice> there;
    std::optional<AutocastScope> autocast;
    if (mode == Mode::kInference) inference.emplace();
    if (mode == Mode::kAutocast) {
      there.emplace(model);
      autocast.emplace(model.device().type());
    }
    loss = model.loss(model.input_of(step, rank)).item<double>();
  });
  EXPECT_TRUE(loss || mode == Mode::kAutocast || message.find("does not require grad") != std::string::npos) << message;
  model.train(trained);
  return loss;
}

/// Of two losses, relative where they are above 1: one rank's may be 200, in fp32.
double apart(const std::optional<double>& got, const std::optional<double>& expected) {
  EXPECT_EQ(got.has_value(), expected.has_value());
  return got && expected ? std::abs(*got - *expected) / std::max(1.0, std::abs(*expected)) : 0;
}

/// The losses of every step, and of this rank's evaluations after all but the last two, whose all-gathers are counted.
struct Curve {
  std::vector<double> losses;
  std::vector<std::optional<double>> evaluations;
};

Mode mode_after(size_t step) { return static_cast<Mode>(step % 3); }

/// `before_last_step` runs in front of the last one.
Curve train(CaseModel& model, const std::vector<int64_t>& ranks, const std::function<void()>& before_last_step) {
  const auto optimizer = model.make_optimizer();
  Curve curve;
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step == kSteps - 1) before_last_step();
    optimizer->zero_grad();
    curve.losses.push_back(model.iterate(step, ranks));
    optimizer->step();
    if (step < kSteps - 2)
      curve.evaluations.push_back(evaluate(model, step, world_rank(), mode_after(static_cast<size_t>(step))));
  }
  return curve;
}

void compare_curves(const Curve& got, const Curve& expected, TrainingDifference& difference) {
  for (size_t step = 0; step < expected.losses.size(); ++step)
    difference.loss = std::max(difference.loss, std::abs(mean_of_ranks(got.losses[step]) - expected.losses[step]));
  for (size_t step = 0; step < expected.evaluations.size(); ++step) {
    const bool autocast = mode_after(step) == Mode::kAutocast;
    auto& largest = autocast ? difference.autocast : difference.evaluation;
    largest = std::max(largest, apart(got.evaluations[step], expected.evaluations[step]));
  }
}

void compare_evaluations(CaseModel& got, CaseModel& expected, TrainingDifference& difference) {
  for (const auto mode : {Mode::kNoGrad, Mode::kInference}) {
    const auto found = evaluate(got, kSteps, world_rank(), mode);
    difference.evaluation = std::max(difference.evaluation, apart(found, evaluate(expected, kSteps, world_rank(), mode)));
  }
}

using GroupList = std::vector<std::weak_ptr<internal::ParameterGroup>>;

GroupList groups_of(const CaseModel& model) {
  const auto groups = fsdp(model).state()->subtree_groups();
  return {groups.begin(), groups.end()};
}

/// Two a group that shards, but the root's and the last other group's stay from forward into backward.
int64_t expected_all_gathers(const CaseModel& model, const GroupList& groups) {
  int64_t expected = 0, others = 0;
  for (const auto& weak : groups) {
    const auto group = weak.lock();
    if (!group->stages().inner_gather().communicator) continue;
    const bool kept = !group->owner->reshards_after_forward();
    expected += kept ? 1 : 2;
    others += kept ? 0 : 1;
  }
  if (expected == 0) return 0;
  return expected - std::min<int64_t>(others, 1) + model.allowance().all_gathers;
}

int64_t all_gathers() { return process_context().count(CollectiveKind::kAllGather).calls; }

} // namespace

std::vector<Strategy> equivalence_strategies() {
  std::vector<Strategy> chosen;
  for (auto& strategy : strategies()) {
    if (strategy.name.starts_with("full") || strategy.name.starts_with("hybrid ragged") ||
        strategy.name.starts_with("hybrid per"))
      chosen.push_back(strategy);
  }
  FullyShardOptions per_parameter;
  per_parameter.layout = BufferLayout::kPerParameter;
  chosen.push_back({"no-shard ragged", world_mesh, {}, /*replicates=*/true});
  chosen.push_back({"no-shard per-parameter", world_mesh, per_parameter, /*replicates=*/true});
  return chosen;
}

void shard_case(CaseModel& model, const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    strategy.replicates ? replicate(module, mesh, strategy.options) : fully_shard(module, mesh, strategy.options);
  };
  for (const auto& unit : model.units()) wrap(*unit);
  wrap(model);
}

TrainingDifference compare_training(const EquivalenceCase& test_case, const Strategy& strategy) {
  std::vector<int64_t> everyone(static_cast<size_t>(world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  auto plain = build(test_case);
  plain->to(twin_device());
  const auto expected = train(*plain, everyone, [] {});

  TrainingDifference difference;
  auto model = build(test_case);
  shard_case(*model, strategy);
  const auto groups = groups_of(*model);
  const int64_t allowed = expected_all_gathers(*model, groups);
  int64_t before = 0;
  const auto got = train(*model, {world_rank()}, [&] { before = all_gathers(); });
  difference.extra_all_gathers = std::max<int64_t>(all_gathers() - before - allowed, 0);
  compare_curves(got, expected, difference);
  compare_state(*model, *plain, difference);
  compare_evaluations(*model, *plain, difference);
  auto& root = *fsdp(*model).state();
  for (const auto& group : root.subtree_groups()) {
    root.schedule()->reshard(*group);
    difference.leaked_bytes += group->unsharded_bytes();
  }
  for (const auto& graph : model->graphs) difference.leaked_graphs += graph.expired() ? 0 : 1;
  model.reset();
  for (const auto& group : groups) difference.leaked_groups += group.expired() ? 0 : 1;
  return difference;
}

std::vector<EquivalenceParam> with_all_strategies(const std::vector<EquivalenceCase>& cases) {
  std::vector<EquivalenceParam> params;
  // The world's size is not known yet: only the names are used before the test runs.
  for (const auto& test_case : cases) {
    for (const auto& name : {"full ragged", "full per-parameter", "hybrid ragged", "hybrid per-parameter", "no-shard ragged",
                             "no-shard per-parameter"})
      params.push_back({test_case, Strategy{name}});
  }
  return params;
}

std::ostream& operator<<(std::ostream& out, const EquivalenceParam& param) {
  return out << param.test_case.name << ", " << param.strategy.name;
}

std::string param_name(const ::testing::TestParamInfo<EquivalenceParam>& info) {
  auto name = info.param.test_case.name + "_" + info.param.strategy.name;
  for (auto& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

void expect_equivalent(const EquivalenceParam& param) {
  const auto all = equivalence_strategies();
  const auto strategy =
      std::find_if(all.begin(), all.end(), [&](const Strategy& each) { return each.name == param.strategy.name; });
  ASSERT_NE(strategy, all.end()) << param.strategy.name;
  const auto difference = compare_training(param.test_case, *strategy);
  ::testing::Test::RecordProperty("difference",
                                  std::to_string(std::max({difference.loss, difference.evaluation, difference.parameters})));
  EXPECT_LE(difference.loss, kTolerance);
  EXPECT_LE(difference.evaluation, kTolerance);
  EXPECT_LE(difference.autocast, kToleranceOfAutocast);
  EXPECT_LE(difference.parameters, kTolerance) << difference.worst;
  EXPECT_EQ(difference.extra_all_gathers, 0);
  EXPECT_EQ(difference.leaked_bytes, 0);
  EXPECT_EQ(difference.leaked_graphs, 0);
  EXPECT_EQ(difference.leaked_groups, 0);
}

} // namespace tessera::testing
