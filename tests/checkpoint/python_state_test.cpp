// Trainings that Python's FSDP2 saved with torch.distributed.checkpoint, and that go on here.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <torch/torch.h>

#include <fstream>

#include "../support/matchers.h"
#include "../support/subprocess.h"
#include "sharded_training.h"
#include "shared_folder.h"

namespace tessera::checkpoint {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::SharedFolder;

struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})))),
        last(register_module("last", torch::nn::Linear(7, 3))),
        shift(register_buffer("shift", torch::zeros({3}))) {
    to(at::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(norm(first(x)))) + shift; }
  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Linear last;
  torch::Tensor shift;
};

// A model whose values and options are all others than the checkpoint's.
template <typename Optimizer, typename Options>
struct Trained {
  explicit Trained(const Options& options) {
    for (auto& parameter : net.parameters()) torch::nn::init::constant_(parameter, 0.5);
    const auto mesh = init_device_mesh(at::kCPU, {process_context().world_size()});
    fully_shard(*net.first, mesh);
    fully_shard(net, mesh);
    std::vector<at::Tensor> matrices, vectors;
    for (const auto& parameter : net.parameters()) (parameter.dim() == 2 ? matrices : vectors).push_back(parameter);
    optimizer.emplace(std::vector<torch::optim::OptimizerParamGroup>{matrices, vectors}, options);
  }

  double step(int64_t number) {
    const auto rows = torch::sin(torch::arange(12 * 5, at::kDouble) + number).view({12, 5});
    const auto loss = net.forward(testing::rows_of(rows, "")).square().mean();
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
    return testing::mean_over_ranks(loss);
  }

  Net net;
  std::optional<Optimizer> optimizer;
};

// What python_state.py writes, once for all tests.
class PythonState : public ::testing::Test {
 public:
  static std::filesystem::path folder() { return shared().value().path(); }

 protected:
  static void SetUpTestSuite() {
    shared().emplace();
    if (process_context().rank() == 0) {
      const std::vector<std::string> command{TESSERA_PYTHON, TESSERA_PYTHON_STATE_SCRIPT, folder()};
      const auto result = testing::run_program(command, {}, std::chrono::seconds(200));
      EXPECT_EQ(result.status, 0) << result.output;
    }
    SharedFolder::barrier();
  }
  static void TearDownTestSuite() { shared().reset(); }

 private:
  static std::optional<SharedFolder>& shared() {
    static std::optional<SharedFolder> folder;
    return folder;
  }
};

std::vector<double> read_losses(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istream_iterator<double>(file), {}};
}

template <typename Optimizer, typename Options>
void expect_goes_on(const std::string& name, const Options& options, const LoadOptions& load_options, int64_t steps_before = 0) {
  SCOPED_TRACE(name);
  const auto folder = PythonState::folder() / name;
  Trained<Optimizer, Options> trained(options);
  for (int64_t step = 0; step < steps_before; ++step) trained.step(step);
  load(state_dict(trained.net, *trained.optimizer), folder / "saved", load_options);
  for (size_t group = 0; group < 2; ++group) {
    const auto& loaded = static_cast<const Options&>(trained.optimizer->param_groups()[group].options());
    EXPECT_EQ(loaded.lr(), group == 0 ? 0.02 : 0.01);
    EXPECT_EQ(loaded.weight_decay(), group == 0 ? 0.1 : 0.0);
  }
  const auto losses = read_losses(folder / "losses.txt");
  ASSERT_EQ(losses.size(), 3);
  double largest = 0;
  for (int64_t step = 0; step < 3; ++step) {
    const auto loss = trained.step(3 + step);
    largest = std::max(largest, std::abs(loss - losses[static_cast<size_t>(step)]));
  }
  EXPECT_LE(largest, 1e-12);
  const auto later = read_state_dict(folder / "later");
  double weights = 0;
  const auto own = state_dict(trained.net);
  ASSERT_EQ(own.size(), later.size());
  for (const auto& entry : own.entries()) {
    const auto difference = testing::whole_tensor(own.tensor(entry.name)) - later.tensor(entry.name);
    weights = std::max(weights, at::Tensor(difference).abs().max().template item<double>());
  }
  EXPECT_LE(weights, 1e-12);
  if (process_context().rank() == 0)
    std::printf("%s: losses differ by at most %.1e, weights by %.1e\n", name.c_str(), largest, weights);
}

const LoadOptions kPython{.python = PythonKeys{}};

std::string in_net(const std::string& name) { return "net." + name; }

TEST_F(PythonState, AdamWGoesOn) {
  const torch::optim::AdamWOptions other(0.5);
  for (const int64_t steps_before : {0, 2}) { // into an optimizer without state, and one that has some
    expect_goes_on<torch::optim::AdamW>("adamw", other, kPython, steps_before);
    expect_goes_on<torch::optim::AdamW>("adamw-flat", other, kPython, steps_before);
  }
}

TEST_F(PythonState, OtherNamesAndKeysAreRenamed) {
  const torch::optim::AdamWOptions other(0.5);
  auto options = kPython;
  options.rename = in_net;
  expect_goes_on<torch::optim::AdamW>("adamw-wrapped-flat", other, options);
  options.python = {.model = "weights", .optimizer = "training.opt"};
  expect_goes_on<torch::optim::AdamW>("adamw-wrapped", other, options);
}

TEST_F(PythonState, OtherOptimizersGoOn) {
  expect_goes_on<torch::optim::Adam>("adam", torch::optim::AdamOptions(0.5), kPython);
  expect_goes_on<torch::optim::SGD>("sgd", torch::optim::SGDOptions(0.5), kPython, 1);
  expect_goes_on<torch::optim::SGD>("sgd-flat", torch::optim::SGDOptions(0.5).momentum(0.1), kPython);
  expect_goes_on<torch::optim::SGD>("sgd-without-state", torch::optim::SGDOptions(0.5).momentum(0.1), kPython, 1);
  expect_goes_on<torch::optim::RMSprop>("rmsprop", torch::optim::RMSpropOptions(0.5), kPython);
  expect_goes_on<torch::optim::Adagrad>("adagrad", torch::optim::AdagradOptions(0.5), kPython);
}

TEST_F(PythonState, TheModelAloneLoads) {
  Trained<torch::optim::SGD, torch::optim::SGDOptions> trained(torch::optim::SGDOptions(0.5));
  const auto path = PythonState::folder() / "sgd" / "saved";
  const auto unused = error_of([&] { load(state_dict(trained.net), path, kPython); });
  EXPECT_THAT(unused, HasSubstr("the checkpoint holds more than the state"));
  auto options = kPython;
  options.allow_unused = true;
  const auto report = load(state_dict(trained.net), path, options);
  EXPECT_TRUE(report.missing.empty());
  EXPECT_THAT(report.unused, ::testing::Contains("optimizer.state.first.weight.momentum_buffer"));
}

TEST_F(PythonState, WhatDoesNotFitIsAnErrorThatNamesIt) {
  Trained<torch::optim::AdamW, torch::optim::AdamWOptions> adamw(torch::optim::AdamWOptions(0.5));
  Trained<torch::optim::SGD, torch::optim::SGDOptions> sgd(torch::optim::SGDOptions(0.5));
  const auto into = [](auto& trained, const std::string& name, const LoadOptions& options) {
    return error_of([&] { load(state_dict(trained.net, *trained.optimizer), PythonState::folder() / name, options); });
  };
  EXPECT_THAT(
      into(adamw, "adam/saved", kPython),
      HasSubstr("optimizer.param_groups.0.decoupled_weight_decay is false, so it is the state of Adam, and here is AdamW"));
  EXPECT_THAT(into(sgd, "adamw/saved", kPython), HasSubstr("optimizer.param_groups.0.momentum"));
  EXPECT_THAT(into(adamw, "numbered", kPython), HasSubstr("optimizer.param_groups.0.params numbers the parameters"));
  EXPECT_THAT(into(adamw, "maximizing", kPython), HasSubstr("optimizer.param_groups.0.maximize is set"));
  EXPECT_THAT(into(adamw, "adamw-wrapped/saved", kPython), HasSubstr("not in the checkpoint"));
  auto one_name = kPython;
  one_name.python->model = "";
  EXPECT_THAT(into(adamw, "adamw/saved", one_name), HasSubstr("not in the checkpoint"));
  auto collision = kPython;
  collision.rename = [](const std::string& name) { return name == "first.weight" ? "last.weight" : name; };
  EXPECT_THAT(into(adamw, "adamw/saved", collision), HasSubstr("get the name \"first.weight\""));
}

} // namespace
} // namespace tessera::checkpoint
