// Parameters with strides of their own, as channels_last gives them.
#include <gtest/gtest.h>

#include <ATen/ops/_fused_adamw.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/optim/step.h>
#include <tessera/training/averaged_model.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::strides_test {
namespace {

using torch::Tensor;

/// Convolutions of several shapes (some cuts of the ragged layout fall inside their rows), a matrix that is stored transposed,
/// and others that are row-major.
struct CnnImpl : torch::nn::Module {
  explicit CnnImpl(bool strided = true) {
    if (!strided) return;
    const torch::NoGradGuard no_grad;
    for (auto* weight : {&first->weight, &second->weight, &point->weight})
      weight->set_data(weight->contiguous(at::MemoryFormat::ChannelsLast));
    head->weight.set_data(head->weight.t().contiguous().t());
  }
  Tensor forward(const Tensor& images) {
    const auto& weight = first->weight; // whose device is the CPU where the shards are offloaded
    auto x = torch::relu(first(images.to(is_dtensor(weight) ? DTensor(weight).mesh().device() : weight.device())));
    x = torch::relu(second(x));
    seen = {unsharded(second->weight).strides().vec(), unsharded(head->weight).strides().vec(), x.strides().vec()};
    x = norm(x.contiguous()); // the simulated device has no other GroupNorm
    return head(point(x.contiguous(at::MemoryFormat::ChannelsLast)).mean({2, 3}));
  }
  torch::nn::Conv2d first{register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)))};
  torch::nn::Conv2d second{register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 7, 3).padding(1)))};
  torch::nn::GroupNorm norm{register_module("norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(1, 7)))};
  torch::nn::Conv2d point{register_module("point", torch::nn::Conv2d(torch::nn::Conv2dOptions(7, 6, 1)))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(6, 4))};
  std::vector<std::vector<int64_t>> seen;
};
TORCH_MODULE(Cnn);

Cnn make_cnn(bool strided = true) {
  torch::manual_seed(0);
  return Cnn(strided);
}

Tensor images_of(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  return torch::randn({12, 3, 6, 6}, generator, torch::kFloat).contiguous(at::MemoryFormat::ChannelsLast);
}

Tensor loss_of(Cnn& cnn, const Tensor& images) { return cnn->forward(images).to(torch::kFloat).square().mean(); }

void shard_cnn(Cnn& cnn, const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    strategy.replicates ? replicate(module, mesh, strategy.options) : fully_shard(module, mesh, strategy.options);
  };
  wrap(*cnn->second);
  wrap(*cnn);
}

void train_step(Cnn& cnn, torch::optim::Optimizer& optimizer, const Tensor& images) {
  optimizer.zero_grad();
  loss_of(cnn, images).backward();
  step(optimizer); // block by block, where the state lies in files
}

/// Those of dims with one element are of no account.
std::vector<int64_t> strides_of(const Tensor& tensor) {
  auto strides = tensor.strides().vec();
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    if (tensor.size(static_cast<int64_t>(dim)) == 1) strides[dim] = 0;
  }
  return strides;
}

std::vector<Strategy> strided_strategies() {
  auto all = strategies();
  FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const Tensor& parameter) -> std::optional<Placement> {
    return Shard{parameter.dim() - 1};
  };
  all.push_back({"last dim", world_mesh, options});
  // Whole rows of dim 0, which are given as so many pairs of the first two dims.
  options.shard_placement_fn = [](const std::string&, const Tensor& parameter) -> std::optional<Placement> {
    if (parameter.dim() != 4) return std::nullopt;
    std::vector<int64_t> extents(static_cast<size_t>(world_size()), 0);
    for (int64_t row = 0; row < parameter.size(0); ++row) extents[static_cast<size_t>(row % world_size())] += parameter.size(1);
    return RaggedShard{1, extents};
  };
  all.push_back({"rows of two dims", world_mesh, options});
  all.push_back({"in files", world_mesh, {.offload = offload_to_files(std::filesystem::temp_directory_path())}});
  return all;
}

TEST(Strides, AChannelsLastModelTrainsAsTheUnshardedOneAndKeepsItsStrides) {
  for (const auto& strategy : strided_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto cnn = make_cnn(), plain = make_cnn();
    shard_cnn(cnn, strategy);
    torch::optim::AdamW ours(cnn->parameters(), 1e-2), theirs(plain->parameters(), 1e-2);
    for (int64_t step = 0; step < 3; ++step) {
      train_step(cnn, ours, part_of(images_of(step), world_rank(), world_size()));
      train_step(plain, theirs, images_of(step));
      EXPECT_EQ(cnn->seen, plain->seen);
    }
    EXPECT_LE(parameter_difference(*cnn, *plain), 2e-4);
    const auto expected = plain->named_parameters();
    for (const auto& item : cnn->named_parameters()) {
      EXPECT_EQ(item.value().strides(), expected[item.key()].strides()) << item.key();
      EXPECT_EQ(item.value().grad().strides(), expected[item.key()].strides()) << item.key();
      EXPECT_EQ(strides_of(DTensor(item.value().grad()).local()), strides_of(DTensor(item.value()).local())) << item.key();
    }
  }
}

TEST(Strides, GradientsOfSeveralBackwardsAndWritesReachTheRightPlaces) {
  for (const auto& strategy : strided_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto cnn = make_cnn(), plain = make_cnn();
    shard_cnn(cnn, strategy);
    for (int64_t step = 0; step < 2; ++step) {
      fsdp(*cnn).set_requires_gradient_sync(step == 1);
      loss_of(cnn, part_of(images_of(step), world_rank(), world_size())).backward();
      loss_of(plain, images_of(step)).backward();
    }
    const auto expected = plain->named_parameters();
    for (const auto& item : cnn->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6);
    const torch::NoGradGuard no_grad;
    for (auto* model : {&cnn, &plain}) {
      (*model)->second->weight.mul_(2);
      (*model)->first->weight.copy_((*model)->first->weight * 3 + 1);
      (*model)->head->weight.index_fill_(0, torch::tensor({2}).to((*model)->head->weight.device()), 5.0);
      unsharded((*model)->point->weight).select(1, 3).fill_(7); // written back to the shards
    }
    EXPECT_LE(parameter_difference(*cnn, *plain), 1e-6);
    EXPECT_NEAR((loss_of(cnn, images_of(3)).cpu() - loss_of(plain, images_of(3))).abs().item<double>(), 0,
                1e-4 * loss_of(plain, images_of(3)).item<double>());
  }
}

TEST(Strides, ACopyHasTheFormatThatItIsAskedFor) {
  auto cnn = make_cnn(), plain = make_cnn();
  fully_shard(cnn, world_mesh());
  using Memory = at::MemoryFormat;
  for (const auto format : {Memory::Contiguous, Memory::ChannelsLast, Memory::Preserve}) {
    const auto strides = [&](const Cnn& of) {
      const auto& weight = of->second->weight;
      return std::pair(strides_of(weight.to(weight.options(), false, false, format)),
                       strides_of((weight * 1).to(torch::kDouble, false, false, format)));
    };
    EXPECT_EQ(strides(cnn), strides(plain)) << static_cast<int>(format);
  }
}

/// Gradients that a program or a hook of its has made anew are row-major.
TEST(Strides, GradientsMayHaveOthersThanTheirParameter) {
  const auto row_major = [](const Tensor& gradient) {
    if (!is_dtensor(gradient)) return gradient.contiguous();
    return Tensor(distribute_tensor(full(gradient), DTensor(gradient).mesh(), DTensor(gradient).placements()));
  };
  for (const auto& strategy : strided_strategies()) {
    for (const bool in_hook : {false, true}) {
      SCOPED_TRACE(strategy.name + (in_hook ? ", in a hook" : ", between backwards"));
      const bool is_off_device = strategy.name == "in files" && !tests_the_cpu();
      if (in_hook && is_off_device) continue; // a hook may not return another device's tensor
      auto cnn = make_cnn(), plain = make_cnn();
      shard_cnn(cnn, strategy);
      for (auto* model : {&cnn, &plain}) {
        for (const auto& parameter : (*model)->parameters()) {
          if (in_hook) parameter.register_hook(row_major);
        }
        for (int64_t step = 0; step < 2; ++step) {
          loss_of(*model, model == &cnn ? part_of(images_of(step), world_rank(), world_size()) : images_of(step)).backward();
          for (auto& parameter : (*model)->parameters()) {
            if (!in_hook && step == 0) parameter.mutable_grad() = row_major(parameter.grad());
          }
        }
      }
      for (const auto& item : cnn->named_parameters())
        EXPECT_TENSORS_CLOSE(full(item.value().grad()), plain->named_parameters()[item.key()].grad(), 1e-4, 1e-6);
    }
  }
}

TEST(Strides, ABFloat16ForwardKeepsThem) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    auto cnn = make_cnn();
    FullyShardOptions options;
    options.layout = layout;
    options.mixed_precision.param_dtype = torch::kBFloat16;
    auto rounded = make_cnn();
    shard_cnn(cnn, {"bf16", world_mesh, options});
    rounded->to(twin_device(), torch::kBFloat16);
    const auto images = images_of(0).to(torch::kBFloat16);
    const auto got = cnn->forward(images), expected = rounded->forward(images);
    if (test_device_type() == c10::kCUDA) {
      EXPECT_TENSORS_CLOSE(got, expected, 2e-2, 2e-2); // cuDNN looks at the alignment of the weights
    } else {
      EXPECT_TENSORS_EQUAL(got, expected);
    }
    EXPECT_EQ(cnn->seen, rounded->seen);
  }
}

TEST(Strides, CheckpointsGoFromOneFormatToTheOther) {
  const SharedFolder folder;
  const auto all = strided_strategies();
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].name);
    const bool strided = i % 2 == 0;
    auto saved = make_cnn(strided), loaded = make_cnn(!strided);
    shard_cnn(saved, all[i]);
    shard_cnn(loaded, all[(i + 3) % all.size()]);
    torch::optim::AdamW saved_adam(saved->parameters(), 1e-2), loaded_adam(loaded->parameters(), 1e-2);
    const auto images = part_of(images_of(0), world_rank(), world_size());
    train_step(saved, saved_adam, images);
    const auto path = folder.path() / (std::to_string(i) + (strided ? " strided" : " row-major"));
    checkpoint::save(state_dict(*saved, saved_adam), path);
    auto state = state_dict(*loaded, loaded_adam);
    checkpoint::load(state, path);
    train_step(saved, saved_adam, images);
    train_step(loaded, loaded_adam, images);
    const auto expected = saved->named_parameters();
    for (const auto& item : loaded->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value()), full(expected[item.key()]), 1e-4, 1e-5);
  }
}

TEST(Strides, AveragesAndFullStateDictsHaveTheValues) {
  for (const auto& strategy : strided_strategies()) {
    SCOPED_TRACE(strategy.name);
    auto cnn = make_cnn(), plain = make_cnn();
    shard_cnn(cnn, strategy);
    AveragedModel average(*cnn, swa());
    average.update_parameters(*cnn);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : cnn->parameters()) parameter.mul_(3);
    }
    average.update_parameters(*cnn);
    const auto expected = plain->named_parameters();
    const auto whole = state_dict(*cnn, {.full_state_dict = true});
    for (const auto& item : expected) EXPECT_TENSORS_CLOSE(whole.tensor(item.key()), item.value().detach() * 3);
    const AveragedWeights averaged(average, *cnn);
    for (const auto& item : cnn->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value()), expected[item.key()].detach() * 2, 1e-5, 1e-6);
    EXPECT_EQ(cnn->forward(images_of(0)).sizes(), (std::vector<int64_t>{12, 4}));
    EXPECT_EQ(cnn->seen, (plain->forward(images_of(0)), plain->seen));
  }
}

TEST(Strides, AFusedStepReadsPartsOfOneOrder) {
  auto cnn = make_cnn(), plain = make_cnn();
  fully_shard(cnn, world_mesh());
  for (auto* model : {&cnn, &plain}) {
    std::vector<Tensor> parameters, gradients, averages, squares, steps;
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : (*model)->parameters()) {
      parameters.push_back(parameter);
      gradients.push_back(torch::ones_like(parameter).mul_(parameter));
      averages.push_back(torch::zeros_like(parameter));
      squares.push_back(torch::zeros_like(parameter));
      steps.push_back(torch::ones({}, torch::dtype(torch::kFloat).device(parameter.device())));
    }
    // One whose part has another order than its parameter's, as a program may make it.
    const auto ones = torch::arange(gradients[0].numel(), torch::kFloat).view(gradients[0].sizes());
    gradients[0] =
        is_dtensor(parameters[0]) ? Tensor(distribute_tensor(ones, world_mesh(), DTensor(parameters[0]).placements())) : ones;
    if (!is_dtensor(parameters[0])) gradients[0] = torch::empty_like(parameters[0]).copy_(ones);
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
  }
  EXPECT_LE(parameter_difference(*cnn, *plain), 1e-5);
}

TEST(Strides, AreTheSameOnAllRanks) {
  if (world_size() == 1) return;
  auto cnn = make_cnn(world_rank() == 0);
  EXPECT_THROWS_WITH(fully_shard(cnn, world_mesh()), "the ranks' models or options differ");
}

TEST(Strides, AreKeptFromTheMetaDevice) {
  torch::nn::Conv2d convolution = on_meta([] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3)); });
  convolution->weight.set_data(convolution->weight.contiguous(at::MemoryFormat::ChannelsLast));
  fully_shard(convolution, world_mesh());
  materialize(*convolution, [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters()) torch::nn::init::ones_(parameter);
  });
  EXPECT_TRUE(unsharded(convolution->weight).is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TENSORS_EQUAL(full(convolution->weight), torch::ones({8, 4, 3, 3}));
}

} // namespace
} // namespace tessera::testing::strides_test
