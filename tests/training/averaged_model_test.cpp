// Averages of weights: on the shards as unsharded, without communication, through checkpoints, and in evaluations.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/dtensor/debug.h>
#include <tessera/training/averaged_model.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/world.h>

namespace tessera::averaged_model_test {
namespace {

using at::Tensor;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::test_device_type;
using testing::TrainedModel;
using testing::Training;
using testing::whole_tensor;
using testing::world_rank;
using testing::world_size;

struct Rule {
  std::string name;
  AverageShare share;
};

std::vector<Rule> rules() { return {{"swa", swa()}, {"ema", ema(0.9)}, {"ema with warm-up", ema(0.99, EmaWarmup{})}}; }

double largest_difference(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// What a process without ranks would do by hand, of the whole weights.
class AverageByHand {
 public:
  void update(const torch::nn::Module& model, const AverageShare& share) {
    const torch::NoGradGuard no_grad;
    auto tensors = model.named_parameters();
    for (const auto& buffer : model.named_buffers()) tensors.insert(buffer.key(), buffer.value());
    for (const auto& item : tensors) {
      const auto whole = whole_tensor(item.value()).clone();
      const auto [found, is_first] = averages_.emplace(item.key(), whole);
      if (!is_first) found->second.add_(whole - found->second, share(n_));
    }
    ++n_;
  }
  double difference(const AveragedModel& average) const {
    const auto state = state_dict(average);
    double largest = 0;
    for (const auto& [name, expected] : averages_)
      largest = std::max(largest, largest_difference(whole_tensor(state.tensor("average." + name)), expected));
    return largest;
  }

 private:
  std::map<std::string, Tensor> averages_;
  int64_t n_ = 0;
};

void move_buffers(const torch::nn::Module& model) {
  for (const auto& buffer : model.buffers()) buffer.mul_(1.25);
}

std::vector<std::string> all_strategies() {
  auto all = testing::strategies_and_layouts();
  all.emplace_back("plain");
  return all;
}

TEST(AverageShares, AreThoseOfTheirFormulas) {
  EXPECT_EQ(swa()(1), 0.5);
  EXPECT_EQ(swa()(9), 0.1);
  EXPECT_EQ(ema()(5), 1 - 0.999);
  EXPECT_NEAR(ema(0.99, EmaWarmup{})(7), std::pow(8, -2.0 / 3), 1e-15); // 0.25: the average follows fast
  EXPECT_EQ(ema(0.99, EmaWarmup{})(100'000), 1 - 0.99);
  EXPECT_NEAR(ema(0.999, EmaWarmup{.inv_gamma = 10, .power = 1})(10), 0.5, 1e-15);
  EXPECT_THROWS_WITH(ema(1.5), "ema: the decay is 1.5, but must lie in [0, 1]");
  EXPECT_THROWS_WITH(ema(std::nan("")), "ema: the decay is nan");
  EXPECT_THROWS_WITH(ema(0.9, EmaWarmup{.power = 0}), "inv_gamma 1 and power 0 of the warm-up must be positive");
}

TEST(AveragedModel, OfShardsIsThatOfWholesWithoutCommunication) {
  double largest = 0;
  for (const auto& strategy : all_strategies()) {
    for (const auto& rule : rules()) {
      SCOPED_TRACE(strategy + ", " + rule.name);
      Training training(strategy, 1);
      AveragedModel average(training.model, rule.share, {.use_buffers = true});
      AverageByHand by_hand;
      for (int64_t step = 0; step < 4; ++step) {
        training.step(step);
        move_buffers(training.model);
        const CountCollectives count;
        average.update_parameters(training.model); // in grad mode
        EXPECT_EQ(count.total_calls(), 0) << count.to_string();
        by_hand.update(training.model, rule.share);
        EXPECT_EQ(average.n_averaged(), step + 1);
        largest = std::max(largest, by_hand.difference(average));
      }
    }
  }
  EXPECT_LE(largest, 1e-7);
  if (world_rank() == 0) std::printf("largest difference to an unsharded average: %g\n", largest);
}

// Collectives of a step, with the average or without it.
std::string collectives_of_a_step(bool averages) {
  Training training("full-ragged", 1);
  AveragedModel average(training.model, ema());
  training.step(0);
  const CountCollectives count;
  training.step(1);
  if (averages) average.update_parameters(training.model);
  return count.to_string();
}

TEST(AveragedModel, AddsNoCollectiveToAStep) {
  const auto without = collectives_of_a_step(false), with = collectives_of_a_step(true);
  EXPECT_EQ(with, without);
  if (world_rank() == 0) std::printf("a step: %s; with an average: %s\n", without.c_str(), with.c_str());
}

TEST(AveragedModel, TakesThisRanksPartOfTheMemory) {
  torch::nn::Sequential model;
  for (int i = 0; i < 3; ++i) model->push_back(torch::nn::Linear(500, 300 + 200 * (i % 2 == 0)));
  const FullyShardOptions unchecked{.initial_weights = InitialWeights::kUnchecked};
  int64_t whole = 0;
  for (const auto& parameter : model->parameters()) whole += static_cast<int64_t>(parameter.nbytes());
  fully_shard(*model, init_device_mesh(test_device_type(), {world_size()}), unchecked);
  const AveragedModel average(*model, ema());
  int64_t here = 0;
  const auto state = state_dict(average);
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) here += static_cast<int64_t>(DTensor(state.tensor(entry.name)).local().storage().nbytes());
  }
  EXPECT_LE(static_cast<double>(here), 1.01 * static_cast<double>(whole) / static_cast<double>(world_size()));
  if (world_rank() == 0)
    std::printf("the average takes %ld bytes on rank 0, of %ld: %.4f\n", here, whole, static_cast<double>(here) / whole);
}

// Weights that both can compute exactly.
constexpr auto kPython = R"(
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
for rule in (get_swa_multi_avg_fn(), get_ema_multi_avg_fn(0.75)):
    model = torch.nn.BatchNorm1d(5, dtype=torch.double)
    average = AveragedModel(model, multi_avg_fn=rule, use_buffers=True)
    del model.num_batches_tracked, average.module.num_batches_tracked
    for step in range(4):
        for i, tensor in enumerate(list(model.parameters()) + list(model.buffers())):
            tensor.data.copy_(torch.arange(5) * (i + 1) / 8 + step ** 3)
        average.update_parameters(model)
    for tensor in list(average.module.parameters()) + list(average.module.buffers()):
        print(*tensor.tolist())
)";

TEST(AveragedModel, AveragesAsPythonsDoes) {
  if (world_size() > 1) GTEST_SKIP() << "one process is enough";
  const auto result = testing::run_program({TESSERA_PYTHON, "-c", kPython}, {}, std::chrono::seconds(120));
  ASSERT_EQ(result.status, 0) << result.output;
  std::istringstream python(result.output);
  for (const auto& rule : {swa(), ema(0.75)}) {
    torch::nn::BatchNorm1d model(5);
    model->to(at::kDouble);
    AveragedModel average(*model, rule, {.use_buffers = true});
    for (int step = 0; step < 4; ++step) {
      const torch::NoGradGuard no_grad;
      int64_t i = 0;
      for (const auto& tensors : {model->parameters(), model->buffers()}) {
        for (auto& tensor : tensors) {
          if (tensor.dim() == 1) tensor.copy_(torch::arange(5, at::kDouble) * ++i / 8 + step * step * step);
        }
      }
      average.update_parameters(*model);
    }
    const auto state = state_dict(average);
    for (const std::string name : {"weight", "bias", "running_mean", "running_var"}) {
      for (int64_t i = 0; i < 5; ++i) {
        double expected = -1;
        python >> expected;
        EXPECT_NEAR(state.tensor("average." + name)[i].item<double>(), expected, 1e-7) << name; // its share of SWA is a float
      }
    }
  }
}

Tensor tokens() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5});
  return torch::randint(0, 11, {4, 5}, generator, at::kLong);
}

Tensor evaluate(TrainedModel& model) {
  const torch::NoGradGuard no_grad;
  return model.forward(tokens()).detach().clone();
}

StateDict copy_of(const torch::nn::Module& model) { return state_dict(model, {.full_state_dict = true}); }

// The tensors of an average under the names of its model.
StateDict as_of_the_model(const StateDict& average) {
  const auto name_of = [](const std::string& name) { return name.substr(std::string("average.").size()); };
  StateDict renamed;
  for (const auto& entry : average.entries()) {
    std::vector<std::string> aliases;
    for (const auto& alias : entry.aliases) aliases.push_back(name_of(alias));
    if (entry.is_tensor()) renamed.add(name_of(entry.name), average.tensor(entry.name), std::move(aliases));
  }
  return renamed;
}

TEST(AveragedWeights, AreInTheModelWhileTheyLive) {
  for (const auto& strategy : all_strategies()) {
    SCOPED_TRACE(strategy);
    Training training(strategy, 1), twin(strategy, 1);
    AveragedModel average(training.model, ema(0.8), {.use_buffers = true});
    for (int64_t step = 0; step < 3; ++step) {
      training.step(step);
      twin.step(step);
      for (auto* each : {&training, &twin}) move_buffers(each->model);
      average.update_parameters(training.model);
    }
    const auto before = copy_of(training.model), averages = state_dict(average, {.full_state_dict = true});
    const auto output = evaluate(training.model);

    TrainedModel plain(2); // unsharded, with the average as its weights
    load_state_dict(plain, as_of_the_model(averages));
    {
      AveragedWeights averaged(average, training.model);
      EXPECT_TENSORS_CLOSE(evaluate(training.model), evaluate(plain), 1e-6, 1e-6);
      EXPECT_THROWS_WITH(average.update_parameters(training.model),
                         "update_parameters: the model holds an average now; let its AveragedWeights end first");
      { // within it, and lost
        const AveragedWeights again(average, training.model);
        const torch::NoGradGuard no_grad;
        for (auto& parameter : training.model.parameters()) parameter.zero_();
      }
      testing::expect_same(copy_of(training.model), copy_of(plain));
      if (strategy.starts_with("full")) averaged.restore(); // or its end
    }
    testing::expect_same(copy_of(training.model), before);
    EXPECT_TENSORS_EQUAL(evaluate(training.model), output);
    testing::expect_same(state_dict(average, {.full_state_dict = true}), averages);
    EXPECT_EQ(training.step(3), twin.step(3)); // training goes on as if nothing had been
    average.update_parameters(training.model);

    average.copy_to(training.model);
    testing::expect_same(copy_of(training.model), as_of_the_model(state_dict(average, {.full_state_dict = true})));
  }
}

void fill(const torch::nn::Module& model, double value) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) parameter.fill_(value);
}

double value_of(const torch::nn::Module& model) {
  const auto values = whole_tensor(model.parameters()[0]);
  EXPECT_TENSORS_EQUAL(values, torch::full_like(values, values.min().item<double>()));
  return values.min().item<double>();
}

// Three scopes of two averages on one model end in every order.
TEST(AveragedWeights, MayEndInAnyOrder) {
  for (const auto& strategy : all_strategies()) {
    SCOPED_TRACE(strategy);
    Training training(strategy, 1);
    auto& model = training.model;
    fill(model, 1);
    auto first = std::make_unique<AveragedModel>(model);
    fill(model, 2);
    auto second = std::make_unique<AveragedModel>(model);
    std::vector<size_t> order{0, 1, 2};
    do {
      fill(model, 3);
      std::vector<std::unique_ptr<AveragedWeights>> scopes;
      for (const auto* average : {first.get(), second.get(), first.get()})
        scopes.push_back(std::make_unique<AveragedWeights>(*average, model));
      for (const auto ends : order) {
        scopes[ends].reset();
        const double expected = scopes[2] ? 1 : scopes[1] ? 2 : scopes[0] ? 1 : 3; // that of the newest
        EXPECT_EQ(value_of(model), expected) << "after the end of scope " << ends;
      }
    } while (std::next_permutation(order.begin(), order.end()));
    { // an average may end before its scope, and so may the program's block by an exception
      EXPECT_THROWS_WITH(
          {
            const AveragedWeights scope(*first, model);
            first.reset();
            TORCH_CHECK(false, "thrown in a scope");
          },
          "thrown in a scope");
      EXPECT_EQ(value_of(model), 3);
    }
  }
}

TEST(AveragedWeights, AreTakenIntoNoAverage) {
  Training training("full-ragged", 1), other("full-ragged", 2);
  auto& model = training.model;
  AveragedModel held(model), running(model, ema(0.5), {.name = "running"});
  for (auto* average : {&held, &running}) average->update_parameters(model);
  fill(model, 2);
  const auto before = state_dict(running, {.full_state_dict = true});
  {
    const AveragedWeights scope(held, model);
    EXPECT_THROWS_WITH(running.update_parameters(model), "update_parameters: the model holds an average now");
    EXPECT_THROWS_WITH(held.update_parameters(model), "update_parameters: the model holds an average now");
    EXPECT_EQ(running.n_averaged(), 1);
    testing::expect_same(state_dict(running, {.full_state_dict = true}), before);
    AveragedModel of_other(other.model);
    of_other.update_parameters(other.model); // whose weights are its own
    held.update_parameters(other.model);
    EXPECT_EQ(held.n_averaged(), 2);
  }
  EXPECT_EQ(value_of(model), 2);
  running.update_parameters(model);
  EXPECT_EQ(running.n_averaged(), 2);
}

TEST(AveragedModel, GoesThroughStateDictsOfOtherLayouts) {
  for (const auto& from : all_strategies()) {
    Training training(from, 1);
    AveragedModel average(training.model, swa());
    for (int64_t step = 0; step < 2; ++step) {
      training.step(step);
      average.update_parameters(training.model);
    }
    for (const auto& to : {"full-ragged", "full-per-parameter", "plain"}) {
      SCOPED_TRACE(from + " to " + to);
      Training other(to, 7);
      AveragedModel loaded(other.model, swa());
      auto target = state_dict(loaded);
      load_state_dict(target, state_dict(average, {.full_state_dict = true, .cpu_offload = true}));
      EXPECT_EQ(loaded.n_averaged(), 2);
      testing::expect_same(state_dict(loaded), state_dict(average));
    }
  }
  // Names, aliases, prefixes; two averages beside each other and their model.
  Training training("full-ragged", 1);
  const AveragedModel fast(training.model, ema(0.9), {.name = "fast"}), slow(training.model, ema(0.99), {.use_buffers = true});
  auto state = training.state();
  state.merge(state_dict(fast, {.prefix = "stage0."}));
  state.merge(state_dict(slow));
  EXPECT_TRUE(state.contains("fast.stage0.head")); // tied
  EXPECT_TRUE(state.contains("fast.n_averaged"));
  EXPECT_TRUE(state.contains("average.blocks.0.1.weight"));
  EXPECT_TRUE(state.contains("average.shift"));
  EXPECT_FALSE(state.contains("fast.stage0.shift"));
}

// The jobs of the next test: in its folder, on their numbers of ranks.
const char* job_folder() { return std::getenv("AVERAGE_TEST_FOLDER"); }

struct AveragedTraining : Training {
  AveragedTraining(const std::string& sharding, uint64_t seed) : Training(sharding, seed) {}
  void step(int64_t first, int64_t last) {
    for (int64_t number = first; number < last; ++number) {
      Training::step(number);
      average.update_parameters(model);
    }
  }
  StateDict state() {
    auto state = Training::state();
    state.merge(state_dict(average));
    return state;
  }
  AveragedModel average{model, ema(0.9, EmaWarmup{})};
};

TEST(Job, SavesAnAverage) {
  if (!job_folder()) GTEST_SKIP() << "is started by AveragedModel.IsSavedAndLoadedOnOtherRanks";
  const std::filesystem::path folder(job_folder());
  AveragedTraining training("full-ragged", 1);
  training.step(0, 3);
  checkpoint::save(training.state(), folder / "step-3");
  training.step(3, 6);
  checkpoint::save(training.state(), folder / "step-6");
}

TEST(Job, GoesOnWithALoadedAverage) {
  if (!job_folder()) GTEST_SKIP() << "is started by AveragedModel.IsSavedAndLoadedOnOtherRanks";
  const std::filesystem::path folder(job_folder());
  for (const auto& strategy : {"full-ragged", "full-per-parameter", "plain"}) {
    SCOPED_TRACE(strategy);
    AveragedTraining training(strategy, 2), expected("plain", 3);
    checkpoint::load(training.state(), folder / "step-3");
    checkpoint::load(expected.state(), folder / "step-3");
    testing::expect_same(state_dict(training.average), state_dict(expected.average));
    EXPECT_EQ(training.average.n_averaged(), 3);
    training.step(3, 6);
    checkpoint::load(expected.state(), folder / "step-6");
    EXPECT_EQ(training.average.n_averaged(), 6);
    const auto got = state_dict(training.average), wanted = state_dict(expected.average);
    for (const auto& entry : wanted.entries()) {
      if (entry.is_tensor())
        EXPECT_TENSORS_CLOSE(whole_tensor(got.tensor(entry.name)), wanted.tensor(entry.name), 1e-4, 1e-5) << entry.name;
    }
  }
  // Into a run without an average, and one that begins its average now.
  Training without("full-ragged", 4);
  checkpoint::load(without.state(), folder / "step-3", {.allow_unused = true});
  AveragedModel later(without.model, swa(), {.name = "later"});
  auto state = without.state();
  state.merge(state_dict(later));
  later.update_parameters(without.model); // after the state dict was taken: its number stays
  checkpoint::load(state, folder / "step-3", {.allow_missing = true, .allow_unused = true});
  EXPECT_EQ(later.n_averaged(), 1);
}

TEST(AveragedModel, IsSavedAndLoadedOnOtherRanks) {
  if (world_size() > 1) GTEST_SKIP() << "starts its own jobs";
  const testing::TemporaryFolder folder;
  const auto run = [&](int ranks, const std::string& test) {
    const auto result = testing::run_program({testing::program_folder() + "/training_tests", "--files", "averaged_model_test",
                                              "--ranks", std::to_string(ranks), "--gtest_filter=Job." + test},
                                             {{"AVERAGE_TEST_FOLDER", folder.path()}}, std::chrono::seconds(250));
    EXPECT_EQ(result.status, 0) << ranks << " ranks\n" << result.output;
  };
  run(4, "SavesAnAverage");
  for (const int ranks : {1, 2, 3, 4}) run(ranks, "GoesOnWithALoadedAverage");
}

struct Mixed : torch::nn::Module {
  Mixed()
      : half(register_module("half", torch::nn::Linear(6, 8))),
        number(register_parameter("number", torch::randn({5}, at::kComplexFloat))),
        base(register_parameter("base", torch::full({7, 2}, 3.0), false)),
        count(register_buffer("count", torch::zeros({2}, at::kLong))) {
    half->to(at::kBFloat16);
  }
  torch::nn::Linear half;
  Tensor number, base, count;
};

TEST(AveragedModel, HasTheDtypesThatTheOptionsSay) {
  at::manual_seed(3);
  Mixed model;
  fully_shard(*model.half, init_device_mesh(test_device_type(), {world_size()}));
  fully_shard(model, init_device_mesh(test_device_type(), {world_size()}));
  AveragedModel average(model, ema(0.999), {.use_buffers = true, .ignore_frozen_params = true, .dtype = at::kFloat}),
      coarse(model, ema(0.999));
  const auto set = [&](double value) {
    const torch::NoGradGuard no_grad;
    model.half->weight.fill_(value);
    model.number.fill_(value);
    model.count.fill_(static_cast<int64_t>(value));
    for (auto* each : {&average, &coarse}) each->update_parameters(model);
  };
  set(1);
  for (int i = 0; i < 10; ++i) set(2);
  const double expected = 2 - std::pow(0.999, 10);
  const auto state = state_dict(average);
  EXPECT_FALSE(state.contains("average.base"));
  EXPECT_TRUE(state_dict(coarse).contains("average.base"));
  EXPECT_TENSORS_CLOSE(whole_tensor(state.tensor("average.half.weight")), torch::full({8, 6}, expected), 1e-6, 0);
  EXPECT_EQ(whole_tensor(state_dict(coarse).tensor("average.half.weight")).max().item<double>(), 1); // rounded away
  EXPECT_EQ(whole_tensor(state.tensor("average.number")).scalar_type(), at::kComplexFloat);
  EXPECT_NEAR(at::real(whole_tensor(state.tensor("average.number"))).min().item<double>(), expected, 1e-6);
  EXPECT_EQ(state.tensor("average.count").max().item<int64_t>(), 2);
  {
    const AveragedWeights averaged(average, model);
    EXPECT_EQ(whole_tensor(model.half->weight).scalar_type(), at::kBFloat16);
    EXPECT_TENSORS_EQUAL(whole_tensor(model.half->weight), torch::full({8, 6}, expected).to(at::kBFloat16));
  }
  EXPECT_EQ(whole_tensor(model.half->weight).min().item<double>(), 2);
  model.base.requires_grad_(true);
  EXPECT_THROWS_WITH(average.update_parameters(model), "only in the model:\n  base\n");
}

TEST(AveragedModel, MayBeMadeInInferenceMode) { // whose tensors cannot be written later
  Mixed model;
  const auto average = [&] {
    const c10::InferenceMode inference;
    return std::make_unique<AveragedModel>(model, swa());
  }();
  average->update_parameters(model);
  average->update_parameters(model);
  const AveragedWeights averaged(*average, model);
  EXPECT_EQ(average->n_averaged(), 2);
}

torch::nn::Linear linear(int64_t inputs = 6, bool bias = true, at::ScalarType dtype = at::kFloat) {
  auto model = torch::nn::Linear(torch::nn::LinearOptions(inputs, 8).bias(bias));
  model->to(dtype);
  return model;
}

torch::nn::Linear sharded(torch::nn::Linear model, BufferLayout layout = BufferLayout::kPerParameter) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()});
  fully_shard(*model, mesh, {.layout = layout, .initial_weights = InitialWeights::kUnchecked});
  return model;
}

TEST(AveragedModel, OfAModelWithAnotherLayoutIsAnError) {
  const auto model = sharded(linear());
  AveragedModel average(*model, ema());
  average.update_parameters(*model);
  struct Case {
    torch::nn::Linear other;
    std::string part;
  };
  const auto here = c10::str(": this is not the model that the average was made of, on rank ", world_rank(), ":\n");
  std::vector<Case> cases{
      {linear(),
       "different in the model:\n  weight: Float[8, 6], not sharded; the average was made of float[8, 6] (Shard(0)) on"},
      {sharded(linear(5)), "different in the model:\n  weight: float[8, 5] (Shard(0)) on"},
      {sharded(linear(6, false)), "only in the average:\n  bias\nMake the average"},
      {sharded(linear(6, true, at::kDouble)), "different in the model:\n  weight: double[8, 6] (Shard(0)) on"},
      {sharded(linear(), BufferLayout::kRagged), "different in the model:\n  weight: float[8, 6] (RaggedShard("}};
  for (const auto& [other, part] : cases) {
    SCOPED_TRACE(part);
    const auto before = state_dict(average, {.full_state_dict = true});
    for (const auto& [what, call] : std::map<std::string, std::function<void()>>{
             {"update_parameters", [&, other = other] { average.update_parameters(*other); }},
             {"copy_to", [&, other = other] { average.copy_to(*other); }},
             {"AveragedWeights", [&, other = other] { const AveragedWeights averaged(average, *other); }}}) {
      EXPECT_THAT(error_of(call),
                  AllOf(HasSubstr(what + here), HasSubstr(part), HasSubstr("\nMake the average after fully_shard")));
    }
    testing::expect_same(state_dict(average, {.full_state_dict = true}), before);
  }
  // Made before fully_shard.
  auto late = linear();
  AveragedModel early(*late);
  sharded(late);
  EXPECT_THROWS_WITH(early.update_parameters(*late), "the average was made of Float[8, 6], not sharded");
}

TEST(AveragedModel, RefusesWhatCannotBeAveraged) {
  const auto model = linear();
  EXPECT_THROWS_WITH(AveragedModel(*model, AverageShare()), "AveragedModel: the share is empty; take ema(decay) or swa()");
  EXPECT_THROWS_WITH(AveragedModel(*model, swa(), {.name = ""}), "AveragedModel: the name is empty");
  EXPECT_THROWS_WITH(AveragedModel(*model, swa(), {.dtype = at::kLong}), "the dtype is Long, but must be a floating-point one");
  AveragedModel wrong(*model, [](int64_t n) { return static_cast<double>(n) + 0.5; });
  wrong.update_parameters(*model);
  EXPECT_THROWS_WITH(wrong.update_parameters(*model), "the share of update 2 is 1.5, but must lie in [0, 1]");
  EXPECT_EQ(wrong.n_averaged(), 1);
  auto meta = on_meta([] { return linear().ptr(); });
  EXPECT_THROWS_WITH(AveragedModel(*meta, swa()), "AveragedModel: weight is on the meta device: call tessera::materialize first");
  fully_shard(*meta, init_device_mesh(test_device_type(), {world_size()}));
  EXPECT_THROWS_WITH(AveragedModel(*meta, swa()), "AveragedModel: weight is on the meta device: call tessera::materialize first");
  StateDict negative;
  negative.add("average.weight", torch::zeros({8, 6}));
  negative.add("average.bias", torch::zeros({8}));
  negative.set("average.n_averaged", -1);
  AveragedModel target(*model);
  auto state = state_dict(target);
  EXPECT_THROWS_WITH(load_state_dict(state, negative), "the checkpoint's \"average.n_averaged\" is -1, but must not be negative");
}

} // namespace
} // namespace tessera::averaged_model_test
