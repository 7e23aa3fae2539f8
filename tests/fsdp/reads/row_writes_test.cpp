// Edits of the rows and columns of sharded parameters and gradients in place: gradient centralization, bounds on the norms of
// rows, pruning. They are right on every number of ranks and in both layouts, also where a shard ends inside a row.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::row_writes_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

/// Changes a weight `w` or its gradient `g` by statistics of their rows and columns.
struct Edit {
  std::string name;
  std::function<void(Tensor& w, Tensor& g)> apply;
};

std::vector<Edit> edits() {
  return {
      {"centralized gradient", [](Tensor&, Tensor& g) { g.sub_(g.mean(1, true)); }},
      {"normalized gradient", [](Tensor&, Tensor& g) { g.div_(g.norm(2, 1, true) + 1e-3); }},
      {"scaled rows", [](Tensor& w, Tensor&) { w.div_(w.norm(2, 1, true)); }},
      {"scaled columns", [](Tensor& w, Tensor&) { w.mul_(w.sum(0, true)); }},
      {"scaled by a vector", [](Tensor& w, Tensor&) { w.mul_(w.sum(0)); }},
      {"max norm", [](Tensor& w, Tensor&) { w.renorm_(2, 0, 0.5); }},
      {"max norm of columns", [](Tensor& w, Tensor&) { w.renorm_(1, 1, 0.5); }},
      {"max norm by hand",
       [](Tensor& w, Tensor&) {
         const auto norms = w.norm(2, 1, true).clamp_min_(1e-7);
         w.mul_(norms.clamp(0, 0.5) / norms);
       }},
      {"addcdiv_", [](Tensor& w, Tensor& g) { w.addcdiv_(g, g.pow(2).sum(1, true) + 1, -0.1); }},
      {"addcmul_", [](Tensor& w, Tensor& g) { w.addcmul_(g, w.mean(0, true)); }},
      {"lerp_", [](Tensor& w, Tensor& g) { w.lerp_(g, g.norm(2, 1, true)); }},
      {"rates of rows", [](Tensor& w, Tensor& g) { w.sub_(g * (1 / (g.amax(1, true) - g.amin(1, true) + 1))); }},
      {"clamped rows",
       [](Tensor& w, Tensor&) {
         const auto bound = w.abs().mean(1, true);
         w.clamp_(-bound, bound);
       }},
      {"pruned rows",
       [](Tensor& w, Tensor&) {
         const auto norms = w.norm(2, 1, true);
         w.masked_fill_(norms < norms.mean(), 0);
       }},
      {"pruned columns", [](Tensor& w, Tensor&) { w.masked_fill_(w.abs().amax(0) < 0.2, 0.5); }},
      {"its sign beside the mean", [](Tensor& w, Tensor&) { w.gt_(w.mean(1, true)); }},
      {"copied column", [](Tensor& w, Tensor&) { w.copy_(w.mean(1, true)); }},
      {"copied row", [](Tensor& w, Tensor&) { w.copy_(w.var(0, false, true)); }},
      {"added up", [](Tensor& w, Tensor&) { w.cumsum_(1); }},
      {"triangle", [](Tensor& w, Tensor& g) { w.add_(g).tril_(); }},
      {"a list of both",
       [](Tensor& w, Tensor& g) {
         torch::_foreach_mul_({w, g}, {w.sum(0, true), g.norm(2, 1, true)});
       }},
  };
}

std::vector<Strategy> chosen_strategies() {
  std::vector<Strategy> chosen;
  for (const auto& strategy : strategies()) {
    const bool hybrid = strategy.name.starts_with("hybrid") && !strategy.name.starts_with("hybrid of");
    if (strategy.name.starts_with("full") || strategy.name.starts_with("zero") || hybrid || strategy.replicates)
      chosen.push_back(strategy);
  }
  return chosen;
}

/// One layer after a backward, of the batch that all ranks have.
nn::Linear make_layer(const Strategy* strategy, int64_t in, int64_t out, at::ScalarType dtype) {
  torch::manual_seed(0);
  nn::Linear layer(nn::LinearOptions(in, out));
  layer->to(dtype);
  const auto x = torch::randn({4, in}, dtype), y = torch::randn({4, out}, dtype);
  if (strategy)
    strategy->replicates ? replicate(*layer, strategy->mesh(), strategy->options)
                         : fully_shard(*layer, strategy->mesh(), strategy->options);
  const auto device = strategy ? test_device() : c10::Device(at::kCPU);
  torch::mse_loss(layer(x.to(device)), y.to(device)).backward();
  return layer;
}

TEST(RowWrites, OfParametersAndGradients) {
  const torch::NoGradGuard no_grad;
  const std::vector<std::pair<int64_t, int64_t>> sizes{{12, 24}, {7, 5}, {5, 1}, {1, 5}, {3, 2}};
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& [in, out] : sizes) {
      for (const auto& edit : edits()) {
        SCOPED_TRACE(c10::str(strategy.name, ": ", edit.name, " of ", out, " x ", in));
        const auto layer_of = [&, in = in, out = out](const Strategy* chosen) {
          const torch::AutoGradMode grad_mode(true);
          return make_layer(chosen, in, out, torch::kDouble);
        };
        auto plain = layer_of(nullptr), sharded = layer_of(&strategy);
        edit.apply(plain->weight, plain->weight.mutable_grad());
        const auto error = error_of([&] { edit.apply(sharded->weight, sharded->weight.mutable_grad()); });
        ASSERT_EQ(error, "no error");
        EXPECT_TENSORS_CLOSE(full(sharded->weight), plain->weight.detach(), 1e-9, 1e-9);
        EXPECT_TENSORS_CLOSE(full(sharded->weight.grad()), plain->weight.grad(), 1e-9, 1e-9);
        const auto row = torch::ones({1, in}, torch::kDouble); // what forward reads is what was written
        EXPECT_TENSORS_CLOSE(full(sharded(row.to(test_device()))), full(plain(row)), 1e-9, 1e-9);
      }
    }
  }
}

/// Steps of SGD in which the gradients' rows are centered and those of the weights bounded.
void train(Net& net, bool sharded, std::vector<double>& losses) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9).weight_decay(1e-3));
  for (int64_t step = 0; step < 4; ++step) {
    auto tokens = global_batch(step);
    if (sharded) tokens = part_of(tokens, world_rank(), world_size());
    optimizer.zero_grad();
    const auto loss = loss_of(net, tokens);
    loss.backward();
    losses.push_back((sharded ? mean_over_ranks(loss) : loss.detach()).item<double>());
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (parameter.dim() > 1) parameter.mutable_grad().sub_(parameter.grad().mean(1, true));
    }
    optimizer.step();
    for (auto& parameter : net->parameters()) {
      if (parameter.dim() > 1) parameter.renorm_(2, 0, 0.8);
    }
  }
}

TEST(RowWrites, TrainingWithCentralizedGradientsAndMaxNorms) {
  Net plain = make_net();
  plain->to(torch::kDouble);
  std::vector<double> expected;
  train(plain, false, expected);
  EXPECT_LT(expected.back(), expected.front());
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    net->to(torch::kDouble);
    shard_model(net, strategy);
    std::vector<double> losses;
    train(net, true, losses);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-9) << "step " << i;
    EXPECT_LT(parameter_difference(*net, *plain), 1e-9);
  }
}

} // namespace
} // namespace tessera::testing::row_writes_test
