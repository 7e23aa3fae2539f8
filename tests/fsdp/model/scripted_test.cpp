// TorchScript modules whose parameters a module of torch::nn registers.
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/nn/script_module.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::scripted_test {
namespace {

using torch::Tensor;

/// What a program compiles, or loads with `torch::jit::load`.
struct Kind {
  std::string name, source;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parameters;
};

std::vector<Kind> kinds() {
  return {{"a residual block",
           "def forward(self, x):\n"
           "  y = torch.tanh(torch.layer_norm(torch.linear(x, self.up, self.bias), [13], self.scale, self.shift))\n"
           "  return x + torch.linear(y, self.down)\n",
           {{"up", {13, 6}}, {"bias", {13}}, {"scale", {13}}, {"shift", {13}}, {"down", {6, 13}}}},
          {"attention",
           "def forward(self, x):\n"
           "  q, k, v = torch.chunk(torch.matmul(x, self.qkv.t()), 3, -1)\n"
           "  scores = torch.softmax(q.unsqueeze(-1) * k.unsqueeze(-2) * 0.4, -1)\n"
           "  return torch.matmul(scores, v.unsqueeze(-1)).squeeze(-1) * self.scale\n",
           {{"qkv", {18, 6}}, {"scale", {6}}}},
          {"convolutions",
           "def forward(self, x):\n"
           "  y = torch.relu(torch.conv1d(x.unsqueeze(1), self.first, self.bias, [1], [1]))\n"
           "  return torch.conv1d(y, self.second).squeeze(1)\n",
           {{"first", {5, 1, 3}}, {"bias", {5}}, {"second", {1, 5, 1}}}}};
}

/// Registers the parameters of a script, so that `fully_shard` finds them.
struct ScriptedImpl : torch::nn::Module {
  explicit ScriptedImpl(const Kind& kind) : script("Script") {
    for (const auto& [name, sizes] : kind.parameters) {
      script.register_parameter(name, torch::randn(sizes) * 0.3, /*is_buffer=*/false);
      register_parameter(name, script.attr(name).toTensor());
    }
    script.define(kind.source);
  }
  Tensor forward(const Tensor& x) { return script.forward({x}).toTensor(); }
  torch::jit::Module script;
};
TORCH_MODULE(Scripted);

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const Kind& kind) {
    torch::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      parts.emplace_back(kind);
      register_module("part" + std::to_string(i), parts.back());
    }
  }
  Tensor forward(Tensor x) {
    for (auto& part : parts) x = recomputes ? recompute(part, x) : part(x);
    return x;
  }
  std::vector<Scripted> parts;
  bool recomputes = false;
};
TORCH_MODULE(Chain);

void shard_chain(Chain& chain, const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    strategy.replicates ? replicate(module, mesh, strategy.options) : fully_shard(module, mesh, strategy.options);
  };
  for (auto& part : chain->parts) wrap(*part);
  wrap(*chain);
}

using Forward = std::function<Tensor(Chain&, const Tensor&)>;

const Forward kDirectly = [](Chain& chain, const Tensor& x) { return chain->forward(x); };

/// Losses of the whole batch: of some steps, and of an evaluation.
std::vector<double> train(Chain& chain, const Forward& forward) {
  const bool shards = is_sharded(*chain);
  torch::optim::AdamW optimizer(chain->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  const auto loss_of_step = [&](int64_t step) {
    auto x = torch::sin(torch::arange(12.0 * 6) * 0.3 + step).view({12, 6});
    if (shards) x = part_of(x, world_rank(), world_size());
    const auto loss = (forward(chain, x).to(torch::kFloat) - x.tanh()).square().mean();
    losses.push_back(shards ? mean_over_ranks(loss).item<double>() : loss.item<double>());
    return loss;
  };
  for (int64_t step = 0; step < 4; ++step) { // the optimizing executor specializes a graph after some runs
    optimizer.zero_grad();
    loss_of_step(step).backward();
    optimizer.step();
  }
  const torch::NoGradGuard no_grad;
  loss_of_step(4);
  return losses;
}

double largest_difference(const std::vector<double>& got, const std::vector<double>& expected) {
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) largest = std::max(largest, std::abs(got.at(i) - expected[i]));
  return largest;
}

class ScriptedModules : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!tests_the_cpu()) GTEST_SKIP() << "scripts of parameters on the CPU";
  }
  PlainExecutor plain_executor_; // of this thread
};

TEST_F(ScriptedModules, TrainAsUnshardedOnes) {
  for (const auto& kind : kinds()) {
    Chain plain(kind);
    const auto expected = train(plain, kDirectly);
    for (const auto& strategy : sweep(strategies(), 4, is_default)) {
      SCOPED_TRACE(kind.name + ", " + strategy.name);
      Chain chain(kind);
      shard_chain(chain, strategy);
      for (const auto& parameter : chain->parts[0]->script.parameters()) EXPECT_TRUE(is_dtensor(parameter));
      EXPECT_LE(largest_difference(train(chain, kDirectly), expected), 1e-5);
      EXPECT_LE(parameter_difference(*chain, *plain), 1e-5);
    }
  }
}

TEST_F(ScriptedModules, ComputeInHalfPrecisionInACall) {
  for (const auto& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    auto strategy = strategies()[0];
    strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    Chain plain(kind), chain(kind);
    const auto expected = train(plain, kDirectly);
    shard_chain(chain, strategy);
    const auto got = train(chain, [](Chain& each, const Tensor& x) { return call(each, x); });
    EXPECT_LE(largest_difference(got, expected), 2e-2);
  }
}

TEST_F(ScriptedModules, AreRecomputed) {
  for (const auto& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Chain plain(kind), chain(kind);
    const auto expected = train(plain, kDirectly);
    shard_chain(chain, strategies()[0]);
    chain->recomputes = true;
    EXPECT_LE(largest_difference(train(chain, kDirectly), expected), 1e-5);
  }
}

/// It differentiates by itself.
TEST_F(ScriptedModules, AreNotReadByTheOptimizingExecutor) {
  torch::jit::setGraphExecutorOptimize(true);
  for (const auto& kind : kinds()) {
    Chain chain(kind);
    shard_chain(chain, strategies()[0]);
    EXPECT_THROWS_WITH(chain(torch::ones({2, 6})), "is read by TorchScript on a thread whose executor optimizes");
  }
}

/// Weights go back into a plain script, which is saved as always.
TEST_F(ScriptedModules, TakeTheWeightsOfAStateDict) {
  const auto kind = kinds()[0];
  torch::manual_seed(0);
  Scripted sharded(kind), fresh(kind);
  const auto x = torch::ones({2, 6});
  const auto expected = sharded(x).detach();
  fully_shard(*sharded, world_mesh());
  std::ostringstream file;
  EXPECT_THROWS_WITH(sharded->script.save(file), "has no storage");
  const auto state = state_dict(*sharded, StateDictOptions{.full_state_dict = true});
  const torch::NoGradGuard no_grad;
  for (const auto& item : fresh->script.named_parameters()) item.value.copy_(state.tensor(item.name));
  EXPECT_TENSORS_CLOSE(fresh(x), expected);
}

} // namespace
} // namespace tessera::testing::scripted_test
