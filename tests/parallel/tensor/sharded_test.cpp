// fully_shard over the data-parallel dims of a mesh whose last dim is tensor-parallel.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/dtensor/debug.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/strategy.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing::sharded_test {
namespace {

constexpr int64_t kRows = 12, kTime = 8;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}
std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

gpt::Gpt make_gpt(torch::Dtype dtype) {
  auto model = seeded_gpt(small_gpt());
  model->to(dtype);
  return model;
}

void shard(gpt::Gpt& model, const ParallelMesh& mesh, bool sequence, const FullyShardOptions& options) {
  parallelize(*model, mesh.tensor_parallel, gpt_plan(sequence));
  for (const auto& block : *model->blocks()) fully_shard(*block, mesh.data_parallel, options);
  fully_shard(*model, mesh.data_parallel, options);
}

torch::Tensor loss_of(gpt::Gpt& model, const Tokens& tokens) {
  return torch::cross_entropy_loss(model->forward(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
}

Tokens part_of(const Tokens& tokens, const ParallelMesh& mesh) {
  const auto mine = [&](const torch::Tensor& rows) { return rows.chunk(mesh.data_ranks())[mesh.data_rank()]; };
  return {mine(tokens.inputs), mine(tokens.targets)};
}

struct Setting {
  bool sequence = false, clips = false, recomputes = false;
  FullyShardOptions options = {};
};

/// Five steps in double beside one process.
void compare(const ParallelMesh& mesh, const Setting& setting, const MakeOptimizer& make_optimizer) {
  auto twin = make_gpt(torch::kDouble), model = make_gpt(torch::kDouble);
  shard(model, mesh, setting.sequence, setting.options);
  model->set_recompute(setting.recomputes);
  const auto reference = make_optimizer(twin->parameters()), optimizer = make_optimizer(model->parameters());
  for (int64_t step = 0; step < 5; ++step) {
    const auto tokens = draw_tokens(step, kRows, kTime);
    reference->zero_grad();
    optimizer->zero_grad();
    loss_of(twin, tokens).backward();
    loss_of(model, part_of(tokens, mesh)).backward();
    if (setting.clips) {
      const auto clip = [step](gpt::Gpt& net) {
        return step % 2 == 0 ? clip_grad_norm_(*net, 0.5).item<double>()
                             : torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
      };
      const double norm = clip(model), expected = clip(twin);
      ASSERT_NEAR(norm, expected, 1e-10) << "step " << step;
    }
    reference->step();
    optimizer->step();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), 1e-8, 1e-11) << item.key();
}

std::vector<std::vector<int64_t>> some_shapes() {
  return sweep(parallel_shapes(), 3, [](const auto& shape) { return shape == std::vector<int64_t>{2, 2}; });
}

TEST(ShardedAndParallel, TrainsAsOneProcessOnEveryMesh) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const bool sequence : {false, true}) {
      for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
        SCOPED_TRACE(c10::str(mesh.all.to_string(), sequence ? ", sequence" : "",
                              layout == BufferLayout::kRagged ? ", ragged" : ", per-parameter"));
        compare(mesh, {.sequence = sequence, .clips = true, .options = {.layout = layout}}, sgd);
      }
      compare(mesh, {.sequence = sequence}, adamw);
    }
  }
}

TEST(ShardedAndParallel, TrainsUnderEveryStrategy) {
  using enum tessera::Strategy;
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const auto strategy : {kNoShard, kZero1, kZero2, kFullShard, kHybridShard, kHierarchical}) {
      if ((row_of(strategy).outer ? 2 : 1) != mesh.data_parallel.ndim()) continue;
      SCOPED_TRACE(c10::str(mesh.all.to_string(), ", ", row_of(strategy).name));
      compare(mesh, {.sequence = true, .clips = true, .options = {.strategy = strategy}}, sgd);
    }
    FullyShardOptions kept;
    kept.reshard_after_forward = false;
    compare(mesh, {.clips = true, .options = kept}, sgd);
  }
}

/// The gradients of norms, of biases and of positions are summed over tp once, whatever the number of groups.
TEST(ShardedAndParallel, SumsWholeParametersOnce) {
  for (const auto& shape : parallel_shapes()) {
    const ParallelMesh mesh(shape);
    const int64_t data_ranks = mesh.data_ranks(), tensor_ranks = mesh.tensor_parallel.size();
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      if (mesh.data_parallel.ndim() > 1) continue; // whose replicas have all-reduces of their own
      auto model = make_gpt(torch::kDouble);
      shard(model, mesh, /*sequence=*/true, {.layout = layout});
      for (const int64_t step : {0, 1}) { // the second one has its communicators
        const auto loss = loss_of(model, part_of(draw_tokens(step, kRows, kTime), mesh));
        const CountCollectives counter;
        loss.backward();
        EXPECT_EQ(counter.count(CollectiveKind::kAllReduce).calls, tensor_ranks > 1 ? 1 : 0) << data_ranks;
      }
    }
  }
}

/// A gradient that is whole counts once among the terms: of a backward of activations that nothing splits.
TEST(ShardedAndParallel, WholeGradientsCountOnceAmongTerms) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    auto twin = make_gpt(torch::kDouble), model = make_gpt(torch::kDouble);
    shard(model, mesh, /*sequence=*/true, {});
    for (const int64_t time : {kTime, int64_t{1}, int64_t{3}}) {
      const auto tokens = draw_tokens(time, kRows, time);
      const auto penalty = [](gpt::Gpt& net) {
        torch::Tensor sum;
        for (const auto& item : net->named_parameters()) {
          if (item.key().find("norm") == std::string::npos) continue;
          const auto square = item.value().square().sum();
          sum = sum.defined() ? sum + square : square;
        }
        return sum;
      };
      (loss_of(twin, tokens) + penalty(twin)).backward();
      (loss_of(model, part_of(tokens, mesh)) + penalty(model)).backward();
    }
    const auto expected = twin->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-8, 1e-11) << item.key();
  }
}

TEST(ShardedAndParallel, Recomputes) {
  const ParallelMesh mesh(parallel_shapes().back());
  for (const bool sequence : {false, true}) compare(mesh, {.sequence = sequence, .clips = true, .recomputes = true}, sgd);
}

/// Activations are cast where a layer reads its weight.
TEST(ShardedAndParallel, ComputesInParamDtype) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const bool sequence : {false, true}) {
      auto twin = make_gpt(torch::kFloat), model = make_gpt(torch::kFloat);
      FullyShardOptions options;
      options.mixed_precision.param_dtype = torch::kDouble;
      options.mixed_precision.reduce_dtype = torch::kDouble;
      shard(model, mesh, sequence, options);
      twin->to(torch::kDouble);
      const auto tokens = draw_tokens(0, kRows, kTime);
      const auto loss = loss_of(model, part_of(tokens, mesh));
      EXPECT_EQ(loss.scalar_type(), torch::kDouble);
      loss.backward();
      loss_of(twin, tokens).backward();
      const auto expected = twin->named_parameters();
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(item.value().grad().scalar_type(), torch::kFloat);
        EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad().to(torch::kFloat), 1e-5, 1e-8)
            << item.key();
      }
    }
  }
}

TEST(ShardedAndParallel, ComputesInBfloat16) {
  const ParallelMesh mesh(parallel_shapes().back());
  auto twin = make_gpt(torch::kFloat), model = make_gpt(torch::kFloat);
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  options.mixed_precision.reduce_dtype = torch::kFloat;
  shard(model, mesh, /*sequence=*/true, options);
  const auto tokens = draw_tokens(0, kRows, kTime);
  const auto loss = gpt::cross_entropy(model->forward(part_of(tokens, mesh).inputs), part_of(tokens, mesh).targets);
  const auto expected = gpt::cross_entropy(twin->forward(part_of(tokens, mesh).inputs), part_of(tokens, mesh).targets);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-2);
  loss.backward();
  for (const auto& item : model->named_parameters()) EXPECT_TRUE(whole_of(item.value().grad()).isfinite().all().item<bool>());
}

/// Without a dim of time LibTorch's linear is one addmm with the bias.
TEST(ShardedAndParallel, TakesPlainRowsOfFeatures) {
  const auto make = [] {
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Linear(6, 24), torch::nn::Tanh(), torch::nn::Linear(24, 5));
    net->to(torch::kDouble);
    return net;
  };
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      SCOPED_TRACE(mesh.all.to_string());
      auto twin = make(), model = make();
      parallelize(*model, mesh.tensor_parallel, {{"0", Colwise{}}, {"2", Rowwise{}}});
      fully_shard(*model, mesh.data_parallel, {.layout = layout});
      torch::manual_seed(6);
      const auto rows = torch::randn({kRows, 6}, torch::kDouble);
      twin->forward(rows).square().mean().backward();
      model->forward(rows.chunk(mesh.data_ranks())[mesh.data_rank()]).square().mean().backward();
      const auto expected = twin->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-8, 1e-11) << item.key();
      const torch::NoGradGuard no_grad;
      EXPECT_TENSORS_CLOSE(whole_of(model->forward(rows)), twin->forward(rows), 1e-8, 1e-11);
    }
  }
}

/// A penalty on whole weights beside a loss on the mesh of tensor parallelism, before the forward and after it.
TEST(ShardedAndParallel, AddsWholeParametersToALoss) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const bool is_first : {false, true}) {
      SCOPED_TRACE(mesh.all.to_string());
      auto twin = make_gpt(torch::kDouble), model = make_gpt(torch::kDouble);
      shard(model, mesh, /*sequence=*/true, {});
      const auto tokens = draw_tokens(0, kRows, kTime);
      const auto penalty = [](gpt::Gpt& net) {
        torch::Tensor sum = torch::zeros({}, torch::kDouble);
        for (const auto& item : net->named_parameters()) {
          const auto weight = is_dtensor(item.value()) ? DTensor(item.value()).full_tensor() : item.value();
          sum = sum + weight.square().sum();
        }
        return 0.01 * sum;
      };
      const auto run = [&](gpt::Gpt& net, const Tokens& own) {
        const auto early = is_first ? penalty(net) : torch::zeros({}, torch::kDouble);
        const auto loss = loss_of(net, own) + early;
        (is_first ? loss : loss + penalty(net)).backward();
      };
      run(twin, tokens);
      run(model, part_of(tokens, mesh));
      const auto expected = twin->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-8, 1e-11) << item.key();
    }
  }
}

/// A model without memory that is split first: its parts get what a whole model gets of one seed, on every mesh.
TEST(ShardedAndParallel, IsInitializedFromTheMetaDeviceAsOneProcess) {
  const auto init = [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false))
      parameter.dim() > 1 ? parameter.normal_(0, 0.02) : parameter.uniform_(-1, 1);
  };
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    SCOPED_TRACE(mesh.all.to_string());
    auto twin = on_meta([] { return gpt::Gpt(small_gpt()); }), model = on_meta([] { return gpt::Gpt(small_gpt()); });
    shard(model, mesh, /*sequence=*/true, {});
    for (auto* net : {&twin, &model}) {
      torch::manual_seed(41);
      EXPECT_TRUE(materialize(**net, init).empty());
    }
    const auto expected = twin->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TENSORS_EQUAL(whole_of(item.value()), expected[item.key()].detach()) << item.key();
    const auto loss = loss_of(model, part_of(draw_tokens(0, kRows, kTime), mesh));
    EXPECT_TRUE(std::isfinite(loss.item<double>()));
    loss.backward();
  }
}

/// What a new process has before it loads.
gpt::Gpt with_other_values(const ParallelMesh& mesh) {
  torch::manual_seed(77);
  gpt::Gpt model(small_gpt());
  model->to(torch::kDouble);
  shard(model, mesh, /*sequence=*/false, {});
  return model;
}

/// A step on one mesh, a checkpoint, and a step on another mesh are two steps of one process.
TEST(ShardedAndParallel, CheckpointsAreOfNoMesh) {
  const SharedFolder folder;
  const auto train = [](gpt::Gpt& model, torch::optim::Optimizer& optimizer, const Tokens& tokens) {
    optimizer.zero_grad();
    loss_of(model, tokens).backward();
    optimizer.step();
  };
  auto twin = make_gpt(torch::kDouble);
  torch::optim::AdamW reference(twin->parameters(), torch::optim::AdamWOptions(1e-3));
  for (const int64_t step : {0, 1}) train(twin, reference, draw_tokens(step, kRows, kTime));
  const auto expected = twin->named_parameters();
  for (const auto& from : parallel_shapes()) {
    const auto path = folder.path() / c10::str(c10::IntArrayRef(from));
    std::map<std::string, torch::Tensor> saved;
    {
      const ParallelMesh mesh(from);
      auto model = make_gpt(torch::kDouble);
      shard(model, mesh, /*sequence=*/true, {});
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
      train(model, optimizer, part_of(draw_tokens(0, kRows, kTime), mesh));
      auto state = state_dict(*model, optimizer);
      checkpoint::save(state, path, {.overwrite = true}); // on one rank two shapes are one
      for (const auto& item : model->named_parameters()) saved[item.key()] = whole_of(item.value()).clone();
    }
    for (const auto& to : some_shapes()) {
      SCOPED_TRACE(c10::str(c10::IntArrayRef(from), " to ", c10::IntArrayRef(to)));
      const ParallelMesh mesh(to);
      auto model = with_other_values(mesh);
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
      auto state = state_dict(*model, optimizer);
      checkpoint::load(state, path);
      for (const auto& item : model->named_parameters()) EXPECT_TENSORS_EQUAL(whole_of(item.value()), saved[item.key()]);
      train(model, optimizer, part_of(draw_tokens(1, kRows, kTime), mesh));
      for (const auto& item : model->named_parameters())
        EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), 1e-8, 1e-11) << item.key();
    }
  }
}

} // namespace
} // namespace tessera::testing::sharded_test
