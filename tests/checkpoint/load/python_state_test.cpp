// Trainings that Python's FSDP2 saved with torch.distributed.checkpoint, and that go on here.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <torch/torch.h>

#include <fstream>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/subprocess.h>

namespace tessera::checkpoint::python_state_test {
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
    return testing::mean_loss_over_ranks(loss);
  }

  Net net;
  std::optional<Optimizer> optimizer;
};

// What python_state.py writes, once for all tests.
class PythonState : public ::testing::Test {
 public:
  static std::filesystem::path folder() { return shared().value().path() / "python"; }

 protected:
  static void SetUpTestSuite() {
    shared().emplace();
    if (process_context().rank() == 0) {
      const std::vector<std::string> command{TESSERA_PYTHON, TESSERA_REMEMBERED_SCRIPT,   "--folder", folder(), "--",
                                             TESSERA_PYTHON, TESSERA_PYTHON_STATE_SCRIPT, folder()};
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

// Flattened, the state of a layer that Python does not have stays as it is.
TEST_F(PythonState, AStateThatIsNotFoundIsReported) {
  Trained<torch::optim::AdamW, torch::optim::AdamWOptions> trained(torch::optim::AdamWOptions(0.5));
  trained.step(0);
  auto options = kPython;
  options.rename = [](const std::string& name) { return name.starts_with("first.") ? "gone." + name.substr(6) : name; };
  const auto path = PythonState::folder() / "adamw-flat" / "saved";
  const auto state = [&] { return state_dict(trained.net, *trained.optimizer); };
  EXPECT_THAT(error_of([&] { load(state(), path, options); }), HasSubstr("\n  optimizer.state.first.weight.exp_avg"));
  options.allow_missing = options.allow_unused = true;
  const auto report = load(state(), path, options);
  EXPECT_THAT(report.missing,
              ::testing::IsSupersetOf({"first.weight", "optimizer.state.first.weight.exp_avg",
                                       "optimizer.state.first.weight.step", "optimizer.param_groups.first.weight.lr"}));
  EXPECT_THAT(report.missing, ::testing::Not(::testing::Contains("optimizer.state.last.weight.step")));
  EXPECT_EQ(state().value<int64_t>("optimizer.state.first.weight.step"), 1);
  EXPECT_EQ(state().value<int64_t>("optimizer.state.last.weight.step"), 3);
}

TEST_F(PythonState, OtherOptimizersGoOn) {
  expect_goes_on<torch::optim::Adam>("adam", torch::optim::AdamOptions(0.5), kPython);
  expect_goes_on<torch::optim::SGD>("sgd", torch::optim::SGDOptions(0.5), kPython, 1);
  expect_goes_on<torch::optim::SGD>("sgd-flat", torch::optim::SGDOptions(0.5).momentum(0.1), kPython);
  expect_goes_on<torch::optim::SGD>("sgd-without-state", torch::optim::SGDOptions(0.5).momentum(0.1), kPython, 1);
  expect_goes_on<torch::optim::RMSprop>("rmsprop", torch::optim::RMSpropOptions(0.5), kPython);
  expect_goes_on<torch::optim::Adagrad>("adagrad", torch::optim::AdagradOptions(0.5), kPython);
}

/// A layer of python_state.py's Tied.
struct Half : torch::nn::Module {
  explicit Half(const torch::Tensor& shared)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", torch::full({7}, 0.5, shared.options()))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias); }
  torch::Tensor weight, bias;
};

struct Tied : torch::nn::Module {
  explicit Tied(at::ScalarType dtype) {
    const auto weight = torch::full({7, 5}, 0.5, dtype).requires_grad_();
    gain = register_parameter("gain", torch::full({1}, 0.5, dtype));
    first = register_module("first", std::make_shared<Half>(weight));
    last = register_module("last", std::make_shared<Half>(weight));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(first->forward(x)) * last->forward(x) * gain; }
  torch::Tensor gain;
  std::shared_ptr<Half> first, last;
};

/// The largest difference of the losses that follow.
double tied_goes_on(const std::string& name, at::ScalarType dtype, const DeviceMesh& mesh, BufferLayout layout) {
  Tied model(dtype);
  fully_shard(model, mesh, {.layout = layout});
  const std::vector<at::Tensor> distinct{model.gain, model.first->weight, model.first->bias, model.last->bias};
  torch::optim::AdamW optimizer(distinct, torch::optim::AdamWOptions(0.5));
  load(state_dict(model, optimizer), PythonState::folder() / name / "saved", kPython);
  double largest = 0;
  int64_t step = 3;
  for (const auto expected : read_losses(PythonState::folder() / name / "losses.txt")) {
    const auto rows = torch::sin(torch::arange(12 * 5, at::kDouble) + step++).view({12, 5});
    const auto loss = model.forward(testing::rows_of(rows, "").to(dtype)).square().mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    largest = std::max(largest, std::abs(testing::mean_loss_over_ranks(loss.to(at::kDouble)) - expected));
  }
  EXPECT_EQ(step, 6);
  return largest;
}

TEST_F(PythonState, ATiedWeightOfAHybridMeshGoesOn) {
  const int64_t ranks = process_context().world_size();
  std::vector<DeviceMesh> meshes{init_device_mesh(at::kCPU, {ranks})};
  if (ranks % 2 == 0) meshes.push_back(init_device_mesh(at::kCPU, {2, ranks / 2}));
  for (const auto& mesh : meshes) {
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      SCOPED_TRACE(c10::str(mesh.to_string(), layout == BufferLayout::kRagged ? ", ragged" : ", per-parameter"));
      EXPECT_LE(tied_goes_on("tied", at::kDouble, mesh, layout), 1e-12);
      EXPECT_LE(tied_goes_on("tied-bf16", at::kBFloat16, mesh, layout), 1e-2) << "gradients are summed in another order";
    }
  }
}

TEST_F(PythonState, TiedNamesMayBecomeOne) {
  Tied same(at::kDouble), renamed(at::kDouble);
  const auto path = PythonState::folder() / "tied" / "saved";
  auto options = kPython;
  options.allow_unused = options.allow_missing = true;
  load(state_dict(same), path, options);
  options.rename = [](const std::string& name) {
    if (name == "first.bias") return std::string("last.bias"); // so that of the checkpoint has no place here
    if (name == "last.bias") return std::string("nowhere");
    return name == "last.weight" ? "first.weight" : name;
  };
  const auto report = load(state_dict(renamed), path, options);
  EXPECT_EQ(report.missing, std::vector<std::string>{"last.bias"});
  EXPECT_TRUE(torch::equal(renamed.first->weight, same.first->weight));
  EXPECT_TRUE(torch::equal(renamed.first->bias, same.last->bias));
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
} // namespace tessera::checkpoint::python_state_test
