// The peak that is predicted beside the one that is held, of steps that gather, recompute and reduce in different ways.
#include <gtest/gtest.h>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/explain.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::explained_peak_test {
namespace {

constexpr int64_t kBlocks = 8;

/// How a step is set and run.
struct Case {
  std::string name;
  std::function<void(Net&)> set = [](Net&) {};
  size_t recomputed = 0;     ///< blocks in one recomputation; 0: none
  bool accumulates = false;  ///< without communication
  size_t used = kBlocks;     ///< blocks whose output counts
  size_t distinct = kBlocks; ///< blocks that are read, again and again
};

FSDPModule block_of(Net& net, size_t index) { return fsdp(*net->blocks[index]); }

/// Each block gathers the `count` after it ahead, and in backward those before it.
void set_lists(Net& net, size_t count) {
  for (size_t i = 0; i < kBlocks; ++i) {
    std::vector<FSDPModule> after, before;
    for (size_t step = 1; step <= count; ++step) {
      if (i + step < kBlocks) after.push_back(block_of(net, i + step));
      if (i >= step) before.push_back(block_of(net, i - step));
    }
    block_of(net, i).set_modules_to_forward_prefetch(after);
    block_of(net, i).set_modules_to_backward_prefetch(before);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t depth : {0, 1, 2})
    all.push_back({"depth " + std::to_string(depth), [depth](Net& net) { fsdp(*net).set_prefetch_depth(depth); }});
  all.push_back({"lists", [](Net& net) { set_lists(net, 2); }});
  all.push_back({"not ahead in backward", [](Net& net) {
                   for (size_t i = 0; i < kBlocks; ++i) block_of(net, i).set_unshard_in_backward(false);
                 }});
  all.push_back({"kept after backward", [](Net& net) { fsdp(*net).set_reshard_after_backward(false); }});
  all.push_back({"one buffer", [](Net& net) { fsdp(*net).set_reduce_scatter_max_input_buffers(1); }});
  all.push_back({.name = "recomputed", .recomputed = 1});
  all.push_back({.name = "four recomputed together", .recomputed = 4});
  all.push_back({.name = "accumulation without communication",
                 .set = [](Net& net) { fsdp(*net).set_requires_gradient_sync(false); },
                 .accumulates = true});
  all.push_back({"frozen first half", [](Net& net) {
                   for (size_t i = 0; i < kBlocks / 2; ++i) {
                     for (auto& parameter : net->blocks[i]->parameters()) parameter.requires_grad_(false);
                   }
                 }});
  all.push_back({.name = "unused second half", .used = kBlocks / 2});
  all.push_back({.name = "half of them read twice", .distinct = kBlocks / 2});
  return all;
}

torch::Tensor forward(Net& net, const Case& tested) {
  const auto tokens = torch::zeros({1, 1}, torch::TensorOptions(test_device()).dtype(torch::kLong)); // activations of some KB
  auto x = net->embedded(tokens);
  const size_t step = std::max<size_t>(tested.recomputed, 1);
  torch::Tensor used;
  for (size_t first = 0; first < kBlocks; first += step) {
    const auto run = [net, first, step, distinct = tested.distinct](torch::Tensor y) {
      for (size_t i = first; i < first + step; ++i) y = net->blocks->ptr<BlockImpl>(i % distinct)->forward(y);
      return y;
    };
    x = tested.recomputed > 0 ? recompute(run, x) : run(x);
    if (first < tested.used) used = x;
  }
  return torch::matmul(net->norm(used), net->embed->weight.t());
}

void step(Net& net, const Case& tested) {
  forward(net, tested).sum().backward();
  if (tested.accumulates) return;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.mul_(0.99); // as an optimizer that keeps nothing
  net->zero_grad();
}

/// Expects the peak of a step, after three of them, within three percent of what is held.
template <typename Step>
void expect_explained(torch::nn::Module& model, HeldMemory& held, const Step& step) {
  for (int warm_up = 0; warm_up < 3; ++warm_up) step();
  held.forget_peak();
  step();
  const auto explained = explain(model, {.optimizer_tensors = 0}).memory;
  EXPECT_NEAR(static_cast<double>(explained.peak) / static_cast<double>(held.peak()), 1, 0.03)
      << explained.peak_at << ": unsharded " << explained.unsharded << ", buffers " << explained.reduce_buffers << ", gradients "
      << explained.gradients << ", parameters " << explained.parameters << ", cached " << explained.cached << ", temporaries "
      << explained.temporaries;
}

TEST(ExplainedPeak, IsWithinThreePercentOfWhatIsHeld) {
  if (world_size() == 1 || !tests_the_cpu()) GTEST_SKIP() << "of what ranks gather; on a device, streams hold some of it longer";
  for (const auto& strategy : strategies()) {
    if (!strategy.name.starts_with("full")) continue; // tessera_bench_test has the others, of the default schedule
    for (const auto& tested : cases()) {
      SCOPED_TRACE(strategy.name + ", " + tested.name);
      HeldMemory held;
      torch::manual_seed(0);
      Net net(61, /*width=*/256, kBlocks);
      net->to(test_device());
      shard_model(net, strategy);
      tested.set(net);
      expect_explained(*net, held, [&] { step(net, tested); });
    }
  }
}

/// A model of layers that differ in size or kind.
struct LayersCase {
  std::string name;
  torch::nn::Sequential layers;
  std::vector<std::shared_ptr<torch::nn::Module>> groups; ///< besides the root's
  torch::Tensor input;
};

LayersCase of_widths(const std::string& name, const std::vector<int64_t>& widths) {
  LayersCase made{name, {}, {}, torch::zeros({1, widths[0]})};
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    torch::nn::Linear layer(widths[i], widths[i + 1]);
    made.layers->push_back(layer);
    made.groups.push_back(layer.ptr());
  }
  return made;
}

LayersCase of_convolutions() {
  LayersCase made{"convolutions", {}, {}, torch::zeros({1, 32, 2, 2})};
  for (int i = 0; i < 6; ++i) {
    torch::nn::Conv2d layer(torch::nn::Conv2dOptions(32 << (i / 2), 32 << ((i + 1) / 2), 3).padding(1));
    made.layers->push_back(layer);
    made.groups.push_back(layer.ptr());
  }
  return made;
}

/// Each block has its norm in its group, and a group for each of its linear layers.
LayersCase of_nested_blocks() {
  LayersCase made{"nested blocks", {}, {}, torch::zeros({1, 128})};
  for (int i = 0; i < 6; ++i) {
    Block block(128);
    made.layers->push_back(block);
    made.groups.insert(made.groups.end(), {block->up.ptr(), block->down.ptr(), block.ptr()});
  }
  return made;
}

std::vector<std::function<LayersCase()>> layers_cases() {
  return {[] {
            return of_widths("shrinking", {1024, 768, 512, 256, 128, 64});
          },
          [] {
            return of_widths("growing", {64, 128, 256, 512, 768, 1024});
          },
          of_convolutions, of_nested_blocks};
}

void expect_explained(LayersCase& tested, const Strategy& strategy, int64_t depth, HeldMemory& held) {
  SCOPED_TRACE(strategy.name + ", " + tested.name + ", depth " + std::to_string(depth));
  const auto mesh = strategy.mesh();
  auto& model = *tested.layers;
  for (const auto& group : tested.groups) fully_shard(*group, mesh, strategy.options);
  fully_shard(model, mesh, strategy.options).set_prefetch_depth(depth);
  expect_explained(model, held, [&] {
    model.forward(tested.input).sum().backward();
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.parameters()) parameter.mul_(0.99);
    model.zero_grad();
  });
}

TEST(ExplainedPeak, OfLayersThatDiffer) {
  if (world_size() == 1 || !tests_the_cpu()) GTEST_SKIP() << "of what ranks gather; on a device, streams hold some of it longer";
  for (const auto& strategy : sweep(strategies(), 5, is_default)) {
    if (strategy.replicates) continue;
    for (const auto& make : layers_cases()) {
      for (const int64_t depth : {0, 1, 2}) {
        HeldMemory held;
        torch::manual_seed(0);
        auto tested = make();
        expect_explained(tested, strategy, depth, held);
      }
    }
  }
}

TEST(ExplainedPeak, OfParametersThatAreWholeBesideOthers) {
  if (world_size() == 1 || !tests_the_cpu()) GTEST_SKIP() << "of what ranks gather; on a device, streams hold some of it longer";
  const ShardPlacementFn narrow_ones_whole = [](const std::string&, const torch::Tensor& parameter) {
    const bool is_whole = parameter.dim() < 2 || parameter.size(0) == 512;
    return is_whole ? std::optional<Placement>(Replicate{}) : std::nullopt;
  };
  for (auto strategy : sweep(strategies(), 5, is_default)) {
    if (strategy.replicates) continue;
    strategy.options.shard_placement_fn = narrow_ones_whole;
    for (const auto& make : layers_cases()) {
      HeldMemory held;
      torch::manual_seed(0);
      auto tested = make();
      expect_explained(tested, strategy, /*depth=*/1, held);
    }
  }
}

} // namespace
} // namespace tessera::testing::explained_peak_test
