// Parameters that tensor parallelism made DTensors, sharded further over the data-parallel dims of the same mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/summary.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::parallel_parameter_test {
namespace {

constexpr int64_t kRows = 12;

torch::Tensor rows_of(int64_t step) {
  torch::manual_seed(1000 + step);
  return torch::randn({kRows, 6});
}

torch::Tensor loss_of(ParallelNet& net, const torch::Tensor& rows) { return net->forward(rows).square().mean(); }

torch::Tensor part_of(const torch::Tensor& rows, const ParallelMesh& mesh) {
  return rows.chunk(mesh.data_ranks())[mesh.data_rank()].to(mesh.all.device());
}

torch::Tensor whole_of(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return (is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor).cpu();
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
}

/// 20 steps beside one process that shards nothing.
void compare(const ParallelMesh& mesh, const FullyShardOptions& options, const MakeOptimizer& make_optimizer, bool clips,
             int64_t hidden = 10) {
  ParallelNet net(hidden, 7), twin(hidden, 7);
  shard_parallel(net, mesh, options);
  const auto optimizer = make_optimizer(net->parameters()), reference = make_optimizer(twin->parameters());
  for (int64_t step = 0; step < 20; ++step) {
    const auto rows = rows_of(step);
    optimizer->zero_grad();
    reference->zero_grad();
    loss_of(net, part_of(rows, mesh)).backward();
    loss_of(twin, rows).backward();
    if (clips) {
      const auto norm = clip_grad_norm_(*net, 0.5).item<double>(), expected = clip_grad_norm_(*twin, 0.5).item<double>();
      ASSERT_NEAR(norm, expected, 1e-5) << "step " << step;
    }
    optimizer->step();
    reference->step();
  }
  const auto expected = twin->named_parameters();
  for (const auto& parameter : net->named_parameters()) {
    EXPECT_TRUE(torch::allclose(whole_of(parameter.value()), expected[parameter.key()].detach(), 0, 1e-5)) << parameter.key();
  }
}

std::vector<std::vector<int64_t>> some_shapes() {
  return sweep(parallel_shapes(), 3, [](const auto& shape) { return shape == std::vector<int64_t>{2, 2}; });
}

TEST(ParallelParameter, TrainsAsOneProcessOnEveryMesh) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      SCOPED_TRACE(c10::str(mesh.all.to_string(), layout == BufferLayout::kRagged ? " ragged" : " per-parameter"));
      compare(mesh, {.layout = layout}, sgd, /*clips=*/true);
      compare(mesh, {.layout = layout}, adamw, /*clips=*/false);
    }
  }
}

TEST(ParallelParameter, TrainsWithDimsThatDoNotDivide) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const int64_t hidden : {1, 5, 7}) {
      SCOPED_TRACE(c10::str(mesh.all.to_string(), ", hidden ", hidden));
      compare(mesh, {}, adamw, /*clips=*/true, hidden);
      compare(mesh, {}, sgd, /*clips=*/true, hidden);
    }
  }
}

TEST(ParallelParameter, TrainsUnderEveryStrategy) {
  using enum tessera::Strategy;
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const auto strategy : {kNoShard, kZero1, kZero2, kFullShard, kHybridShard, kHierarchical}) {
      if ((row_of(strategy).outer ? 2 : 1) != mesh.data_parallel.ndim()) continue;
      SCOPED_TRACE(c10::str(mesh.all.to_string(), ", ", row_of(strategy).name));
      compare(mesh, {.strategy = strategy}, adamw, /*clips=*/true);
    }
    FullyShardOptions kept;
    kept.reshard_after_forward = false;
    SCOPED_TRACE(c10::str(mesh.all.to_string(), ", kept after forward"));
    compare(mesh, kept, sgd, /*clips=*/false);
  }
}

TEST(ParallelParameter, LiesAsInFsdp2) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const ParallelMesh mesh({2, 2});
  ParallelNet net(10, 7);
  const auto before = net->layers[0]->up->weight.detach().clone(), bias = net->layers[0]->down->bias.detach().clone();
  shard_parallel(net, mesh, {.layout = BufferLayout::kPerParameter});
  const DTensor up(net->layers[0]->up->weight), down(net->layers[0]->down->weight), head(net->head->weight);
  EXPECT_EQ(up.mesh(), mesh.all);
  EXPECT_EQ(up.placements(), (Placements{StridedShard{0, 2}, Shard{0}}));
  EXPECT_EQ(up.sizes(), (std::vector<int64_t>{10, 6}));
  EXPECT_EQ(down.placements(), (Placements{Shard{0}, Shard{1}}));
  EXPECT_EQ(head.placements(), (Placements{Shard{0}, Replicate{}}));
  EXPECT_TRUE(torch::equal(whole_of(up), before));
  // 5 rows of tp's part, of which the first dp rank has 3.
  const auto rows = up.local();
  const auto part = before.narrow(0, world_rank() % 2 * 5, 5);
  EXPECT_TRUE(torch::equal(rows.cpu(), world_rank() < 2 ? part.narrow(0, 0, 3) : part.narrow(0, 3, 2)));
}

/// In the ragged layout a rank owns a range of what tp has left, whichever dim that split, and the group is gathered in place.
TEST(ParallelParameter, LiesInARangeOfItsPart) {
  for (const auto& shape : parallel_shapes()) {
    const ParallelMesh mesh(shape);
    for (const int64_t hidden : {10, 7, 1}) {
      ParallelNet net(hidden, 7), twin(hidden, 7);
      shard_parallel(net, mesh, {});
      SCOPED_TRACE(c10::str(mesh.all.to_string(), ", hidden ", hidden));
      for (const auto& group : summary(*net).groups) EXPECT_EQ(group.layout, "ragged");
      const auto expected = twin->named_parameters();
      for (const auto& item : net->named_parameters()) {
        const DTensor parameter(item.value());
        const auto& placements = parameter.placements();
        SCOPED_TRACE(c10::str(item.key(), ' ', parameter.spec().to_string()));
        EXPECT_EQ(parameter.mesh(), DeviceMesh::concatenate({mesh.tensor_parallel, mesh.data_parallel}));
        EXPECT_EQ(std::holds_alternative<RaggedShard>(placements.back()), parameter.dim() > 0);
        EXPECT_EQ(placements[0], DTensor(unsharded(item.value())).placements()[0]);
        EXPECT_TRUE(torch::equal(whole_of(parameter), expected[item.key()].detach()));
        // The parts of the data-parallel ranks, one after another, are the part of tp.
        const auto part = DTensor(unsharded(item.value())).local().detach().flatten();
        const auto local = parameter.local().flatten();
        int64_t begin = 0;
        if (parameter.dim() > 0) {
          const auto& ragged = std::get<RaggedShard>(placements.back());
          const auto unit = std::accumulate(parameter.local().sizes().begin() + 1, parameter.local().sizes().end(), int64_t{1},
                                            std::multiplies<>());
          begin = std::min(part.numel(), ragged.extents.sum_before(
                                             static_cast<size_t>(mesh.data_parallel.local_rank(mesh.data_parallel.ndim() - 1))) *
                                             unit);
        }
        EXPECT_TRUE(torch::equal(local, part.narrow(0, begin, local.numel())));
      }
    }
  }
}

/// Parameters that most ranks have nothing of, split by tp along every dim, packed ones too.
struct OddParametersImpl : torch::nn::Module {
  OddParametersImpl() {
    torch::manual_seed(3);
    const std::vector<std::vector<int64_t>> shapes{{0, 3}, {3, 0}, {1}, {1, 1}, {5}, {5, 1, 3}, {2, 5, 3}, {7, 3}};
    for (const auto& sizes : shapes) {
      for (size_t dim = 0; dim <= sizes.size(); ++dim) {
        const auto name = "p" + std::to_string(dim) + "_" + std::to_string(splits.size());
        splits[name] = dim == sizes.size() ? Placement(StridedShard{0, 2}) : Shard{static_cast<int64_t>(dim)};
        register_parameter(name, torch::randn(sizes));
      }
    }
  }
  torch::Tensor forward() {
    auto sum = torch::zeros({}, parameters()[0].device());
    for (const auto& parameter : parameters()) sum = sum + whole_of_graph(parameter.square().sum());
    return sum;
  }
  static torch::Tensor whole_of_graph(const torch::Tensor& tensor) {
    return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
  }
  std::map<std::string, Placement> splits;
};
TORCH_MODULE(OddParameters);

TEST(ParallelParameter, MayBeEmptyOrSmallerThanItsRanks) {
  for (const auto& shape : parallel_shapes()) {
    const ParallelMesh mesh(shape);
    SCOPED_TRACE(mesh.all.to_string());
    OddParameters odd, twin;
    distribute_module(*odd, mesh.tensor_parallel,
                      [&](const std::string& name, const torch::Tensor&) { return Placements{odd->splits.at(name)}; });
    fully_shard(*odd, mesh.data_parallel);
    torch::optim::SGD optimizer(odd->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD reference(twin->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      reference.zero_grad();
      const auto loss = odd->forward(), expected = twin->forward();
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-4);
      loss.backward();
      expected.backward();
      EXPECT_NEAR(clip_grad_norm_(*odd, 1.0).item<double>(), clip_grad_norm_(*twin, 1.0).item<double>(), 1e-4);
      optimizer.step();
      reference.step();
    }
    const auto expected = twin->named_parameters();
    for (const auto& parameter : odd->named_parameters()) {
      const auto whole = whole_of(parameter.value());
      EXPECT_TRUE(torch::allclose(whole, expected[parameter.key()].detach(), 0, 1e-5))
          << parameter.key() << ' ' << DTensor(parameter.value()).spec().to_string();
    }
  }
}

TEST(ParallelParameter, IsReadAsTheDTensorThatItWas) {
  const auto n = world_size();
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1, n}, {n, 1}}) {
    const ParallelMesh mesh(shape);
    ParallelNet net(8, 7), twin(8, 7);
    shard_parallel(net, mesh, {});
    const auto& weight = net->layers[0]->up->weight;
    const DTensor read(unsharded(weight));
    EXPECT_EQ(read.mesh(), mesh.tensor_parallel);
    EXPECT_EQ(read.placements(), Placements{Shard{0}});
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(read.full_tensor().cpu(), twin->layers[0]->up->weight));
    const DTensor turned(weight.t());
    EXPECT_EQ(turned.mesh(), mesh.tensor_parallel);
    EXPECT_TRUE(torch::equal(turned.full_tensor().cpu(), twin->layers[0]->up->weight.t()));
    const auto rows = rows_of(0);
    EXPECT_TRUE(torch::allclose(net->forward(rows.to(mesh.all.device())).cpu(), twin->forward(rows), 1e-5, 1e-6));
    EXPECT_EQ(weight.sizes(), twin->layers[0]->up->weight.sizes());
  }
}

/// The backward of a layer that needs its weight whole over tp, after the group was freed.
TEST(ParallelParameter, IsGatheredForABackwardThatMovesIt) {
  const auto n = world_size();
  if (n < 2) GTEST_SKIP() << "needs 2 ranks";
  const ParallelMesh mesh(n == 4 ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{n, 1});
  ParallelNet net(8, 7), twin(8, 7);
  shard_parallel(net, mesh, {});
  const auto rows = rows_of(0);
  const auto run = [](ParallelNet& model, torch::Tensor x, const DeviceMesh& tp) {
    x.requires_grad_();
    auto& first = model->layers[0]->up->weight;
    const auto input = tp.defined() ? torch::Tensor(from_local(x, tp, {Replicate{}})) : x;
    auto product = torch::matmul(input, first.t()).sin(); // x W', sharded by columns
    auto moved = tp.defined() ? torch::Tensor(DTensor(torch::matmul(product, first)).redistribute({Replicate{}}))
                              : torch::matmul(product, first);
    auto local = tp.defined() ? to_local(moved) : moved;
    model->layers[1]->forward(local).square().mean().backward(); // another group is read between
    return x.grad();
  };
  const auto part = part_of(rows, mesh).clone(), own = rows.chunk(mesh.data_ranks())[mesh.data_rank()].clone();
  EXPECT_TRUE(torch::allclose(run(net, part, mesh.tensor_parallel).cpu(), run(twin, own, {}), 1e-4, 1e-5));
}

TEST(ParallelParameter, IsReadAgainInARecompute) {
  const ParallelMesh mesh(parallel_shapes().back());
  ParallelNet net(10, 7), twin(10, 7);
  shard_parallel(net, mesh, {});
  const auto part = part_of(rows_of(0), mesh).requires_grad_();
  auto x = part;
  for (auto& layer : net->layers) x = recompute(layer, x);
  x.square().mean().backward();
  auto expected = rows_of(0);
  for (auto& layer : twin->layers) expected = layer->forward(expected);
  expected.square().mean().backward();
  const auto parameters = twin->layers[0]->named_parameters();
  for (const auto& parameter : net->layers[0]->named_parameters())
    EXPECT_TRUE(torch::allclose(whole_of(parameter.value().grad()), parameters[parameter.key()].grad(), 1e-4, 1e-6))
        << parameter.key();
}

TEST(ParallelParameter, AccumulatesWithoutCommunication) {
  const ParallelMesh mesh(parallel_shapes().back());
  ParallelNet net(10, 7), twin(10, 7);
  shard_parallel(net, mesh, {});
  {
    const auto scope = no_sync(*net);
    loss_of(net, part_of(rows_of(0), mesh)).backward();
  }
  loss_of(net, part_of(rows_of(1), mesh)).backward();
  for (const int64_t step : {0, 1}) loss_of(twin, rows_of(step)).backward();
  const auto expected = twin->named_parameters();
  for (const auto& parameter : net->named_parameters())
    EXPECT_TRUE(torch::allclose(whole_of(parameter.value().grad()), expected[parameter.key()].grad(), 1e-4, 1e-6))
        << parameter.key();
}

TEST(ParallelParameter, ComputesInParamDtype) {
  const ParallelMesh mesh(parallel_shapes().back());
  ParallelNet net(10, 7), twin(10, 7);
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kDouble;
  options.mixed_precision.reduce_dtype = torch::kDouble;
  shard_parallel(net, mesh, options);
  twin->to(torch::kDouble);
  const auto rows = rows_of(0);
  const auto loss = loss_of(net, part_of(rows, mesh));
  EXPECT_EQ(loss.scalar_type(), torch::kDouble);
  loss.backward();
  loss_of(twin, rows.to(torch::kDouble)).backward();
  const auto expected = twin->named_parameters();
  for (const auto& parameter : net->named_parameters()) {
    const auto gradient = whole_of(parameter.value().grad());
    EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::allclose(gradient, expected[parameter.key()].grad().to(torch::kFloat), 1e-5, 1e-7)) << parameter.key();
  }
}

std::string error_of_sharding(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  return error_of([&] { fully_shard(module, mesh, options); });
}

TEST(ParallelParameter, BadMeshesAndPlacementsNameTheParameter) {
  const auto n = world_size();
  const auto mesh = init_device_mesh(test_device_type(), {1, n}, {"dp", "tp"});
  const auto tp = mesh["tp"], dp = mesh["dp"];
  const auto linear = [&](const DeviceMesh& over, const Placement& placement) {
    torch::nn::Linear made(4, 4);
    distribute_module(*made, over, [&](const std::string& name, const torch::Tensor&) {
      return Placements(over.ndim(), name == "weight" ? placement : Placement(Replicate{}));
    });
    return made;
  };
  auto partial = linear(tp, Partial{});
  EXPECT_THAT(error_of_sharding(*partial, dp),
              ::testing::HasSubstr(
                  "the parameter weight is a DTensor already, float[4, 4] (Partial(sum)) on " + tp.to_string() +
                  ", and only a parameter that is Shard, StridedShard or Replicate over other dims can be sharded further"));
  auto other = linear(make_device_mesh(test_device_type(), {1}, {world_rank()}, {"x"}), Shard{0});
  if (n > 1) EXPECT_THAT(error_of_sharding(*other, dp), ::testing::HasSubstr("are slices of different meshes"));
  auto overlapping = linear(tp, Shard{0});
  if (n > 1)
    EXPECT_THAT(error_of_sharding(*overlapping, tp),
                ::testing::HasSubstr("the parameter weight is a DTensor already, float[4, 4] (Shard(0)) on " + tp.to_string() +
                                     ", and cannot be sharded over " + tp.to_string()));
  auto chosen = linear(tp, Shard{0});
  FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const torch::Tensor& parameter) -> std::optional<Placement> {
    return RaggedShard{0, RankValues{parameter.size(0)}};
  };
  EXPECT_THAT(error_of_sharding(*chosen, dp, options),
              ::testing::HasSubstr("which is a DTensor that other dims of the mesh split"));
}

/// As over the slice of the data-parallel dims: in a mesh of two dims and in one of three, whose "tp" is foreign.
TEST(ParallelParameter, IsShardedOverNamedDimsOfTheWholeMesh) {
  for (const auto& shape : parallel_shapes()) {
    const ParallelMesh mesh(shape);
    SCOPED_TRACE(mesh.all.to_string());
    ParallelNet sliced(10, 7), named(10, 7);
    shard_parallel(sliced, mesh, {});
    make_parallel(named, mesh.tensor_parallel);
    FullyShardOptions options;
    options.data_parallel_dims = shape.size() == 2 ? DataParallelDims{.outer = {}, .inner = {"dp"}}
                                                   : DataParallelDims{.outer = {"replicate"}, .inner = {"shard"}};
    for (auto& layer : named->layers) fully_shard(*layer, mesh.all, options);
    fully_shard(*named, mesh.all, options);
    for (auto* net : {&sliced, &named}) loss_of(*net, part_of(rows_of(0), mesh)).backward();
    const auto expected = sliced->named_parameters();
    for (const auto& parameter : named->named_parameters()) {
      SCOPED_TRACE(parameter.key());
      const DTensor got(parameter.value()), other(expected[parameter.key()]);
      EXPECT_EQ(got.mesh(), other.mesh());
      EXPECT_EQ(got.placements(), other.placements());
      EXPECT_TRUE(torch::equal(DTensor(got.grad()).local(), DTensor(other.grad()).local()));
    }
  }
}

TEST(ParallelParameter, ShardsAlongTheChosenDim) {
  const ParallelMesh mesh(parallel_shapes().back());
  FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const torch::Tensor& parameter) -> std::optional<Placement> {
    if (parameter.dim() < 2) return std::nullopt;
    return Shard{1};
  };
  compare(mesh, options, adamw, /*clips=*/true);
}

TEST(ParallelParameter, MayBeWholeOnTheDataParallelRanks) {
  for (const auto& shape : some_shapes()) {
    const ParallelMesh mesh(shape);
    for (const int64_t most_dims : {1, 2}) {
      SCOPED_TRACE(c10::str(mesh.all.to_string(), ", up to ", most_dims, " dims"));
      FullyShardOptions options;
      options.shard_placement_fn = [=](const std::string&, const torch::Tensor& parameter) {
        return parameter.dim() <= most_dims ? std::optional<Placement>(Replicate{}) : std::nullopt;
      };
      compare(mesh, options, adamw, /*clips=*/true);
    }
  }
}

TEST(ParallelParameter, IsMadeOnTheMetaDevice) {
  if (test_device_type() != at::kCPU) GTEST_SKIP() << "of the CPU";
  const ParallelMesh mesh(parallel_shapes().back());
  auto net = on_meta([] { return ParallelNet(10, 7); });
  make_parallel(net, mesh.tensor_parallel);
  for (auto& layer : net->layers) fully_shard(*layer, mesh.data_parallel);
  fully_shard(*net, mesh.data_parallel);
  EXPECT_TRUE(DTensor(net->head->weight).local().is_meta());
  const auto left = materialize(*net, [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(0.5);
  });
  EXPECT_TRUE(left.empty());
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(whole_of(parameter).eq(0.5).all().item<bool>());
  EXPECT_EQ(DTensor(unsharded(net->layers[0]->up->weight)).mesh(), mesh.tensor_parallel);
  loss_of(net, part_of(rows_of(0), mesh)).backward();
}

TEST(ParallelParameter, ItsGroupIsNotMadeAgain) {
  const ParallelMesh mesh(parallel_shapes().front());
  ParallelNet net(10, 7);
  shard_parallel(net, mesh, {});
  EXPECT_THROWS_WITH(reshard_parameters(*net, {.dtype = torch::kDouble}), "lies over other dims of the mesh too");
}

} // namespace
} // namespace tessera::testing::parallel_parameter_test
