#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint.h>
#include <tessera/fsdp.h>
#include <tessera/nn/average_buffers.h>
#include <tessera/nn/sync_batch_norm.h>
#include <tessera/training/averaged_model.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::script_module_test {
namespace {

using torch::Tensor;

constexpr int64_t kWidth = 6;

/// A layer of a script: what it registers, and its code.
struct Layer {
  std::string name;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parameters;
  std::string source;
};

const std::vector<Layer> kLayers = {
    {"Residual",
     {{"up", {13, kWidth}}, {"bias", {13}}, {"scale", {13}}, {"shift", {13}}, {"down", {kWidth, 13}}},
     "def forward(self, x):\n"
     "  y = torch.tanh(torch.layer_norm(torch.linear(x, self.up, self.bias), [13], self.scale, self.shift))\n"
     "  return x + torch.linear(y, self.down)\n"},
    {"Attention",
     {{"qkv", {3 * kWidth, kWidth}}, {"scale", {kWidth}}},
     "def forward(self, x):\n"
     "  q, k, v = torch.chunk(torch.matmul(x, self.qkv.t()), 3, -1)\n"
     "  scores = torch.softmax(q.unsqueeze(-1) * k.unsqueeze(-2) * 0.4, -1)\n"
     "  return torch.matmul(scores, v.unsqueeze(-1)).squeeze(-1) * self.scale\n"},
    {"Convolution",
     {{"first", {5, 1, 3}}, {"bias", {5}}, {"second", {1, 5, 1}}},
     "def forward(self, x):\n"
     "  y = torch.tanh(torch.conv1d(x.unsqueeze(1), self.first, self.bias, [1], [1]))\n"
     "  return torch.conv1d(y, self.second).squeeze(1)\n"},
    {"Recurrent",
     {{"input", {3 * kWidth, 1}}, {"hidden", {3 * kWidth, kWidth}}, {"bias", {3 * kWidth}}, {"bias2", {3 * kWidth}}},
     "def forward(self, x):\n"
     "  y, h = torch.gru(x.unsqueeze(-1), torch.zeros([1, x.size(0), 6]), [self.input, self.hidden, self.bias, self.bias2],\n"
     "                   True, 1, 0.0, False, False, True)\n"
     "  return y[:, -1]\n"},
    {"Counting", // assigns its buffers, one of which is in the result
     {{"weight", {kWidth}}},
     "def forward(self, x):\n"
     "  self.seen = self.seen + 1\n"
     "  return x * self.weight + self.offset\n"},
};

torch::jit::Module script_of(const Layer& layer) {
  torch::jit::Module script(layer.name);
  script.register_attribute("training", c10::BoolType::get(), true);
  for (const auto& [name, sizes] : layer.parameters)
    script.register_parameter(name, torch::randn(sizes) * 0.4, /*is_buffer=*/false);
  for (const auto& [name, parameter] : script.named_parameters(/*recurse=*/false)) parameter.set_requires_grad(true);
  if (layer.name == "Counting") {
    script.register_parameter("seen", torch::zeros({2}), /*is_buffer=*/true);
    script.register_parameter("offset", torch::ones({kWidth}) * 0.1, /*is_buffer=*/true);
  }
  script.define(layer.source);
  return script;
}

/// Layers in a row below a container, and a weight beside them that comes twice in the result.
torch::jit::Module script_of(const std::vector<Layer>& layers, unsigned long seed) {
  torch::manual_seed(static_cast<int64_t>(seed));
  torch::jit::Module body("Body"), top("Top");
  std::string source = "def forward(self, x):\n";
  for (size_t i = 0; i < layers.size(); ++i) {
    body.register_module("layer" + std::to_string(i), script_of(layers[i]));
    source += "  x = self.layer" + std::to_string(i) + ".forward(x)\n";
  }
  body.define(source + "  return x\n");
  for (auto* each : {&body, &top}) each->register_attribute("training", c10::BoolType::get(), true);
  top.register_module("body", body);
  const auto tied = (torch::randn({kWidth, kWidth}) * 0.4).requires_grad_();
  top.register_parameter("head", tied, /*is_buffer=*/false);
  top.register_parameter("again", tied, /*is_buffer=*/false);
  top.register_parameter("frozen", torch::randn({kWidth}), /*is_buffer=*/false);
  top.define(
      "def forward(self, x):\n"
      "  y = torch.matmul(self.body.forward(x), self.head) + self.frozen\n"
      "  return torch.matmul(torch.tanh(y), self.again.t())\n"
      "def both(self, x, scale: float):\n"
      "  y = self.forward(x)\n"
      "  return y, y.sum() * scale\n");
  return top;
}

/// What torch::jit::load reads of it: another copy each time.
torch::jit::Module load(const torch::jit::Module& script, std::optional<at::Device> device = {}) {
  std::stringstream file;
  script.save(file);
  return torch::jit::load(file, device);
}

std::vector<Layer> drawn_layers(std::mt19937& draw) {
  std::vector<Layer> layers;
  for (size_t i = 0, count = 2 + draw() % 3; i < count; ++i) layers.push_back(kLayers[draw() % kLayers.size()]);
  return layers;
}

/// Each tensor once: LibTorch lists a tied one for each of its names.
std::vector<Tensor> distinct(const torch::nn::Module& module) {
  std::vector<Tensor> distinct;
  for (const auto& each : module.parameters()) {
    const auto is_each = [&](const Tensor& other) { return other.is_same(each); };
    if (std::none_of(distinct.begin(), distinct.end(), is_each)) distinct.push_back(each);
  }
  return distinct;
}

using Forward = std::function<Tensor(ScriptModule&, const Tensor&)>;
const Forward kDirectly = [](ScriptModule& model, const Tensor& x) { return model->forward(x); };

Tensor batch_of(int64_t step, bool is_part) {
  const auto x = torch::sin(torch::arange(12.0 * kWidth) * 0.3 + step).view({12, kWidth});
  return is_part ? part_of(x, world_rank(), world_size()) : x;
}

/// Losses of the whole batch: of some steps, the second in two micro-batches, and of evaluations.
std::vector<double> train(ScriptModule& model, const Forward& forward = kDirectly) {
  const bool shards = is_sharded(*model);
  torch::optim::AdamW optimizer(distinct(*model), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  const auto loss_of = [&](int64_t step) {
    const auto x = batch_of(step, shards);
    const auto loss = (forward(model, x).to(torch::kFloat) - x.tanh()).square().mean();
    losses.push_back(shards ? mean_over_ranks(loss).item<double>() : loss.item<double>());
    return loss;
  };
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    if (step == 1) {
      const auto scope = no_sync(*model);
      loss_of(7).backward();
    }
    loss_of(step).backward();
    losses.push_back(clip_grad_norm_(*model, 0.5).item<double>());
    optimizer.step();
  }
  model->eval();
  {
    const torch::NoGradGuard no_grad;
    loss_of(4);
  }
  const c10::InferenceMode inference;
  loss_of(5);
  return losses;
}

double largest_difference(const std::vector<double>& got, const std::vector<double>& expected) {
  double largest = std::abs(static_cast<double>(got.size()) - static_cast<double>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) largest = std::max(largest, std::abs(got.at(i) - expected[i]));
  return largest;
}

ScriptModule shard(const torch::jit::Module& script, const Strategy& strategy, bool in_groups = true) {
  auto options = strategy.options;
  if (strategy.replicates) options.strategy = tessera::Strategy::kNoShard;
  const auto is_layer = [](const std::string& path, const std::string&) { return path.starts_with("body."); };
  return in_groups ? fully_shard(script, strategy.mesh(), submodules_where(is_layer), options)
                   : fully_shard(script, strategy.mesh(), options);
}

class ScriptModules : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!tests_the_cpu()) GTEST_SKIP() << "scripts with weights on the CPU";
  }
};

TEST_F(ScriptModules, HaveTheNamesOfTheScript) {
  const auto script = load(script_of({kLayers[0], kLayers[4]}, 1));
  ScriptModule model(script);
  const auto names = [](const auto& items, const auto& name_of) {
    std::string text;
    for (const auto& item : items) text += name_of(item) + " ";
    return text;
  };
  const auto key = [](const auto& item) { return item.key(); };
  EXPECT_EQ(names(model->named_parameters(), key),
            "head again frozen body.layer0.up body.layer0.bias body.layer0.scale body.layer0.shift body.layer0.down "
            "body.layer1.weight ");
  EXPECT_EQ(names(model->named_buffers(), key), "body.layer1.seen body.layer1.offset ");
  EXPECT_EQ(names(model->named_modules("", /*include_self=*/false), key), "body body.layer0 body.layer1 ");
  EXPECT_EQ(model->at("body.layer1")->name(), "Counting");
  EXPECT_EQ(model->at("").get(), model.get());
  EXPECT_EQ(ScriptModule(script).get(), model.get());
  EXPECT_FALSE(model->named_parameters()["frozen"].requires_grad());
  for (const auto& item : script.named_parameters()) EXPECT_TRUE(item.value.is_same(model->named_parameters()[item.name]));
  model->at("body.layer0")->eval();
  EXPECT_TRUE(model->is_training());
  EXPECT_FALSE(script.attr("body").toModule().attr("layer0").toModule().is_training());
  EXPECT_TRUE(script.attr("body").toModule().attr("layer1").toModule().is_training());
}

TEST_F(ScriptModules, RunTheirMethods) {
  ScriptModule model(load(script_of({kLayers[0]}, 1)));
  const auto x = batch_of(0, /*is_part=*/false);
  const auto [y, sum] = model->method<std::tuple<Tensor, Tensor>>("both", x, 2.0);
  EXPECT_TENSORS_EQUAL(y.detach(), model->forward(x).detach());
  EXPECT_TENSORS_CLOSE(sum.detach(), (y.sum() * 2).detach());
  EXPECT_THROWS_WITH(model->method("both", x, 2.0), "the method both of the script Top returned a Tuple and no tensor");
  EXPECT_THROWS_WITH(model->method("encode", x), "the script Top has no method \"encode\"");
  EXPECT_THROWS_WITH(model->at("body.layer"), "the script Top has no submodule \"body.layer\"; the nearest is \"body.layer0\"");
  EXPECT_THROWS_WITH(model->at("body.layer0."), "has no submodule \"body.layer0.\"");
  EXPECT_THROWS_WITH(model->at("body.layer0")->at("x"), "the script Residual has no submodule \"x\": it has none at all");
}

TEST_F(ScriptModules, DrawnOnesTrainAsUnshardedOnes) {
  auto draw = next_sweep_generator();
  for (int round = 0; round < (full_run() ? 12 : 2); ++round) {
    const auto layers = drawn_layers(draw);
    const auto script = script_of(layers, draw());
    ScriptModule plain(load(script));
    const auto expected = train(plain);
    for (const auto& strategy : sweep(strategies(), 3, is_default)) {
      SCOPED_TRACE(strategy.name + ", round " + std::to_string(round));
      const auto sharded = load(script);
      auto model = shard(sharded, strategy, draw() % 4 != 0);
      for (const auto& parameter : sharded.parameters()) EXPECT_TRUE(is_dtensor(parameter));
      EXPECT_LE(largest_difference(train(model), expected), 1e-5);
      EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
      for (const auto& item : model->named_buffers()) EXPECT_TENSORS_EQUAL(item.value(), plain->named_buffers()[item.key()]);
    }
  }
}

TEST_F(ScriptModules, AreRecomputedAndCalledInHalfPrecision) {
  auto strategy = strategies()[0];
  const auto script = script_of({kLayers[0], kLayers[2], kLayers[1]}, 2);
  ScriptModule plain(load(script));
  const auto expected = train(plain);
  auto recomputed = shard(load(script), strategy);
  EXPECT_LE(
      largest_difference(train(recomputed, [](ScriptModule& model, const Tensor& x) { return recompute(model, x); }), expected),
      1e-5);
  auto counting = shard(load(script_of({kLayers[0], kLayers[4]}, 2)), strategy);
  EXPECT_THROWS_WITH(recompute(counting, batch_of(0, /*is_part=*/true)).sum().backward(),
                     "the script Counting is recomputed, but assigns its buffer seen");
  strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  auto half = shard(load(script), strategy);
  EXPECT_LE(largest_difference(train(half, [](ScriptModule& model, const Tensor& x) { return call(model, x); }), expected), 5e-2);
}

TEST_F(ScriptModules, RunOnThreadsAndScriptsAreReadInAPlainExecutorAlone) {
  const auto script = load(script_of({kLayers[0]}, 1));
  ScriptModule plain(load(script));
  const auto x = batch_of(0, /*is_part=*/true);
  const auto expected = plain->forward(x).detach();
  auto model = fully_shard(script, world_mesh(), submodules({"body.layer0"}));
  const auto words = "is read by TorchScript on a thread whose executor optimizes";
  std::thread([&] {
    auto own = script;
    EXPECT_THROWS_WITH(own.forward({x}), words);
    const torch::NoGradGuard no_grad;
    EXPECT_THROWS_WITH(own.forward({x}), "body.layer0.up");
    EXPECT_TENSORS_CLOSE(model->forward(x), expected);
    const PlainExecutor plain_executor;
    EXPECT_TENSORS_CLOSE(own.forward({x}).toTensor(), expected);
  }).join();
  EXPECT_TENSORS_CLOSE(model->forward(x).detach(), expected);
  EXPECT_THROWS_WITH(torch::jit::Module(script).forward({x}), words); // the setting came back
  EXPECT_NO_THROW(model->parameters()[0].sum().item());               // a read of the program
}

/// Graphs that the optimizing executor has made are run whatever the thread asks for.
TEST_F(ScriptModules, ForgetWhatWasCompiledBefore) {
  const auto source = script_of({kLayers[0], kLayers[1]}, 1);
  ScriptModule plain(load(source));
  const auto expected = train(plain);
  auto script = load(source);
  const auto body = script.attr("body").toModule();
  for (int run = 0; run < 4; ++run) {
    script.forward({batch_of(0, /*is_part=*/true)}).toTensor().sum().backward();
    torch::jit::Module(body).forward({batch_of(0, /*is_part=*/true)});
  }
  for (const auto& parameter : script.parameters()) parameter.mutable_grad().reset();
  auto model = shard(script, strategies()[0]);
  EXPECT_LE(largest_difference(train(model, [](ScriptModule& each, const Tensor& x) { return recompute(each, x); }), expected),
            1e-5);
}

TEST_F(ScriptModules, FollowBuffersThatTheScriptAssigns) {
  const auto script = load(script_of({kLayers[4]}, 1));
  auto model = fully_shard(script, world_mesh());
  const auto x = batch_of(0, /*is_part=*/true);
  model->forward(x);
  EXPECT_TENSORS_EQUAL(model->named_buffers()["body.layer0.seen"], torch::full({2}, 1.0));
  {
    const PlainExecutor plain;
    torch::jit::Module(script).forward({x});
  }
  EXPECT_TENSORS_EQUAL(state_dict(*model).tensor("body.layer0.seen"), torch::full({2}, 2.0));
  script.attr("body").toModule().attr("layer0").toModule().setattr("seen", torch::full({2}, static_cast<float>(world_rank())));
  average_buffers(*model, world_mesh());
  const auto mean = static_cast<float>(world_size() - 1) / 2;
  EXPECT_TENSORS_CLOSE(script.attr("body").toModule().attr("layer0").toModule().attr("seen").toTensor(), torch::full({2}, mean));
}

TEST_F(ScriptModules, ErrorsOfParametersThatAreReplaced) {
  const auto script = load(script_of({kLayers[0]}, 1));
  auto model = fully_shard(script, world_mesh());
  auto layer = script.attr("body").toModule().attr("layer0").toModule();
  const auto before = layer.attr("bias");
  const auto words = "the parameter bias of the script Residual is another one than when its ScriptModule was made";
  layer.setattr("bias", torch::zeros({13}, torch::requires_grad()));
  EXPECT_THROWS_WITH(model->forward(batch_of(0, true)), words);
  EXPECT_THROWS_WITH(state_dict(*model), words);
  layer.setattr("bias", before);
  auto body = script.attr("body").toModule();
  const auto other = load(script_of({kLayers[0]}, 2));
  body._ivalue()->setSlot(body.type()->getAttributeSlot("layer0"), other.attr("body").toModule().attr("layer0"));
  EXPECT_THROWS_WITH(model->forward(batch_of(0, true)), "the submodule layer0 of the script Body is another one");
  body._ivalue()->setSlot(body.type()->getAttributeSlot("layer0"), layer._ivalue());
  EXPECT_NO_THROW(model->forward(batch_of(0, true)));
  EXPECT_THROWS_WITH(torch::jit::Module(script).to(torch::kDouble), "body.layer0.");
}

TEST_F(ScriptModules, ErrorsOfWhatCannotBeSharded) {
  const auto script = load(script_of({kLayers[0], kLayers[1]}, 1));
  const auto mesh = world_mesh();
  EXPECT_THROWS_WITH((void)fully_shard(script, mesh, submodules({"body.layr1"})), "the nearest is \"body.layer1\"");
  EXPECT_THROWS_WITH((void)fully_shard(script, mesh, submodules({""})), "the path \"\" is the script itself");
  EXPECT_THROWS_WITH((void)fully_shard(script, mesh, submodules_of_class("Linear")),
                     "the script Top has no submodule of the class Linear; it has Attention, Body, Residual");
  const auto none = [](const std::string&, const std::string&) { return false; };
  EXPECT_THROWS_WITH((void)fully_shard(script, mesh, submodules_where(none)),
                     "the rule holds for no submodule of the script Top");
  EXPECT_THROWS_WITH(submodules_where(nullptr), "the rule for submodules is an empty function");
  auto evaluated = load(script);
  evaluated.eval();
  const auto frozen = torch::jit::freeze(evaluated);
  const auto constants = "has no parameter: its weights are constants of the graph of forward";
  EXPECT_THROWS_WITH((void)fully_shard(frozen, mesh), constants);
  EXPECT_THROWS_WITH((void)fully_shard(torch::jit::optimize_for_inference(evaluated), mesh), constants);
  auto model = fully_shard(script, mesh);
  EXPECT_THROWS_WITH((void)fully_shard(script, mesh), "is sharded already");
  std::ostringstream file;
  EXPECT_THROWS_WITH(script.save(file), "has no storage");
}

TEST_F(ScriptModules, TakeWhatOtherModulesTake) {
  ScriptModule plain(load(script_of({kLayers[0], kLayers[1]}, 1)));
  const auto script = load(script_of({kLayers[0], kLayers[1]}, 1));
  ScriptModule model(script);
  torch::optim::AdamW optimizer(distinct(*model), 1e-2), plain_optimizer(distinct(*plain), 1e-2);
  shard(script, strategies()[0]);
  EXPECT_EQ(fsdp(*model->at("body.layer1")).parameter_names(),
            (std::vector<std::string>{"body.layer1.qkv", "body.layer1.scale"}));
  EXPECT_NE(summary(*model).to_string().find("body.layer0"), std::string::npos);
  EXPECT_FALSE(explain(*model).groups.empty());
  fsdp(*model).unshard();
  const auto x = batch_of(0, /*is_part=*/false);
  const auto step = [&](ScriptModule& each, torch::optim::AdamW& its, const Tensor& loss) {
    its.zero_grad();
    loss.backward();
    clip_grad_value_(*each, 0.01);
    its.step();
  };
  for (int i = 0; i < 2; ++i) {
    step(plain, plain_optimizer, plain->forward(x).square().mean());
    const auto both = &ScriptModuleImpl::method<std::tuple<Tensor, Tensor>, const Tensor&, const double&>;
    const auto y = std::get<0>(call(model, both, std::string("both"), x, 2.0));
    step(model, optimizer, y.square().mean());
  }
  EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
  AveragedModel average(*model);
  average.update_parameters(*model);
  average.copy_to(*model);
  EXPECT_LE(parameter_difference(*model, *plain), 1e-5);
  optimizer.zero_grad();
  reshard_parameters(*model, {.dtype = torch::kDouble});
  for (const auto& parameter : script.parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kDouble);
  EXPECT_TENSORS_CLOSE(model->forward(x.to(torch::kDouble)).detach().to(torch::kFloat), plain->forward(x).detach());
}

/// The class of Python's module, whose operator is LibTorch's.
torch::jit::Module batch_norm_script(bool tracks) {
  torch::jit::Module norm("BatchNorm1d");
  norm.register_attribute("training", c10::BoolType::get(), true);
  norm.register_parameter("weight", torch::ones({kWidth}, torch::requires_grad()), /*is_buffer=*/false);
  norm.register_parameter("bias", torch::zeros({kWidth}, torch::requires_grad()), /*is_buffer=*/false);
  if (tracks) {
    norm.register_parameter("running_mean", torch::zeros({kWidth}), /*is_buffer=*/true);
    norm.register_parameter("running_var", torch::ones({kWidth}), /*is_buffer=*/true);
  }
  const std::string statistics = tracks ? "self.running_mean, self.running_var, self.training" : "None, None, True";
  norm.define("def forward(self, x):\n  return torch.batch_norm(x, self.weight, self.bias, " + statistics +
              ", 0.1, 1e-5, False)\n");
  return norm;
}

TEST_F(ScriptModules, HaveSynchronizedBatchNorms) {
  ScriptModule plain(batch_norm_script(true));
  const auto x = batch_of(0, /*is_part=*/false);
  const auto expected = part_of(plain->forward(x), world_rank(), world_size()).detach();
  const auto script = batch_norm_script(true);
  auto model = fully_shard(script, world_mesh());
  EXPECT_EQ(convert_sync_batch_norm(*model, world_mesh()), std::vector<std::string>{""});
  EXPECT_TENSORS_CLOSE(model->forward(batch_of(0, /*is_part=*/true)).detach(), expected);
  EXPECT_TENSORS_CLOSE(script.attr("running_mean").toTensor(), plain->named_buffers()["running_mean"]);
  EXPECT_TENSORS_CLOSE(script.attr("running_var").toTensor(), plain->named_buffers()["running_var"]);
  ScriptModule without(batch_norm_script(false));
  EXPECT_THROWS_WITH(convert_sync_batch_norm(*without, world_mesh()), "BatchNorm1d of a script has no running statistics");
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  EXPECT_THROWS_WITH((void)fully_shard(batch_norm_script(true), world_mesh(), options),
                     "the norm BatchNorm1d would compute with its weight in BFloat16 beside running statistics in Float");
}

TEST_F(ScriptModules, AreSavedUnshardedAndAsCheckpoints) {
  const SharedFolder folder;
  const auto script = load(script_of({kLayers[0], kLayers[3], kLayers[4]}, 1));
  auto model = shard(script, strategies()[0]);
  train(model);
  const auto x = batch_of(0, /*is_part=*/false);
  const auto expected = [&] {
    const torch::NoGradGuard no_grad;
    return model->forward(x);
  }();
  const auto file = folder.path() / "script.pt";
  checkpoint::save_script(model, file, {.extra_files = {{"note.txt", "trained"}}});
  torch::jit::ExtraFilesMap extra{{"note.txt", ""}};
  torch::jit::load(file.string(), {}, extra);
  EXPECT_EQ(extra["note.txt"], "trained");
  EXPECT_THROWS_WITH(checkpoint::save_script(model, file), "exists already");
  EXPECT_THROWS_WITH(checkpoint::save_script(nullptr, file), "the module is null");
  checkpoint::save_script(model, file, {.overwrite = true});
  ScriptModule loaded(torch::jit::load(file.string()));
  EXPECT_TENSORS_CLOSE(loaded->forward(x).detach(), expected, 1e-6, 1e-6);
  EXPECT_TRUE(loaded->named_parameters()["head"].is_same(loaded->named_parameters()["again"]));
  EXPECT_TRUE(loaded->named_parameters()["head"].requires_grad());
  EXPECT_FALSE(loaded->named_parameters()["frozen"].requires_grad());
  EXPECT_FALSE(loaded->is_training());

  checkpoint::save_hugging_face(state_dict(*model), folder.path() / "weights");
  ScriptModule from_weights(load(script_of({kLayers[0], kLayers[3], kLayers[4]}, 5)));
  checkpoint::load(state_dict(*from_weights), folder.path() / "weights");
  EXPECT_LE(parameter_difference(*from_weights, *loaded), 0);
  checkpoint::save(state_dict(*model), folder.path() / "checkpoint");
  ScriptModule whole(load(script_of({kLayers[0], kLayers[3], kLayers[4]}, 5)));
  checkpoint::load(state_dict(*whole), folder.path() / "checkpoint");
  EXPECT_LE(parameter_difference(*whole, *loaded), 0);
  auto again = fully_shard(load(script_of({kLayers[0], kLayers[3], kLayers[4]}, 6)), world_mesh());
  load_state_dict(*again, state_dict(*model));
  EXPECT_LE(parameter_difference(*again, *loaded), 0);
}

TEST_F(ScriptModules, AreBuiltWithoutMemory) {
  const SharedFolder folder;
  const auto source = script_of({kLayers[0], kLayers[4]}, 1);
  ScriptModule whole(load(source));
  checkpoint::save(state_dict(*whole), folder.path() / "checkpoint");
  const auto script = load(source, torch::kMeta);
  auto model = shard(script, strategies()[0]);
  const auto unwritten = materialize(*model, [](torch::nn::Module&) {});
  EXPECT_EQ(unwritten.empty(), false);
  checkpoint::load(state_dict(*model), folder.path() / "checkpoint");
  const auto x = batch_of(0, /*is_part=*/false);
  EXPECT_TENSORS_CLOSE(model->forward(x).detach(), whole->forward(x).detach());
}

/// A module of torch::nn may hold a script among others.
struct HybridImpl : torch::nn::Module {
  explicit HybridImpl(const torch::jit::Module& script)
      : body(register_module("body", ScriptModule(script))), head(register_module("head", torch::nn::Linear(kWidth, kWidth))) {}
  Tensor forward(const Tensor& x) { return head(body->forward(x)); }
  ScriptModule body;
  torch::nn::Linear head;
};
TORCH_MODULE(Hybrid);

TEST_F(ScriptModules, ArePartsOfModules) {
  const auto script = script_of({kLayers[0]}, 1);
  torch::manual_seed(1);
  Hybrid plain(load(script));
  torch::manual_seed(1);
  Hybrid model(load(script));
  fully_shard(*model->body->at("body"), world_mesh());
  fully_shard(model, world_mesh());
  EXPECT_TRUE(is_sharded(*model->body->at("body")));
  const auto x = batch_of(0, /*is_part=*/false);
  EXPECT_TENSORS_CLOSE(model(x).detach(), plain(x).detach());
}

} // namespace
} // namespace tessera::testing::script_module_test
