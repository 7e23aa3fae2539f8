#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>

#include <tessera/tests/fsdp/models.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// Of the meshes that follow.
inline at::DeviceType mesh_device_type = test_device_type();

inline DeviceMesh world_mesh() { return init_device_mesh(mesh_device_type, {world_size()}, {"shard"}); }

/// One way to shard a model.
struct Strategy {
  std::string name;
  std::function<DeviceMesh()> mesh = world_mesh;
  FullyShardOptions options;
  bool replicates = false;
};

/// full, reshard_after_forward = false or a number of ranks, no-shard, hybrid and hierarchical, each with both layouts, and
/// ZeRO-1 and 2.
inline std::vector<Strategy> strategies() {
  std::vector<Strategy> all;
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    const std::string suffix = layout == BufferLayout::kRagged ? " ragged" : " per-parameter";
    FullyShardOptions options;
    options.layout = layout;
    all.push_back({"full" + suffix, world_mesh, options});
    const auto hybrid = [](int64_t replicas) {
      return [replicas] {
        return init_device_mesh(mesh_device_type, {replicas, world_size() / replicas}, {"replicate", "shard"});
      };
    };
    all.push_back({"hybrid" + suffix, hybrid(world_size() % 2 == 0 ? 2 : 1), options});
    all.push_back({"hybrid of single ranks" + suffix, hybrid(world_size()), options});
    options.strategy = tessera::Strategy::kHierarchical;
    all.push_back({"hierarchical" + suffix, hybrid(world_size() % 2 == 0 ? 2 : 1), options});
    options.strategy = layout == BufferLayout::kRagged ? tessera::Strategy::kZero1 : tessera::Strategy::kZero2;
    all.push_back({std::string(row_of(*options.strategy).name) + suffix, world_mesh, options});
    options.strategy.reset();
    options.reshard_after_forward = false;
    all.push_back({"kept after forward" + suffix, world_mesh, options});
    options.reshard_after_forward = 2;
    if (world_size() == 4) all.push_back({"among neighbours after forward" + suffix, world_mesh, options});
  }
  all.push_back({"no-shard", world_mesh, {}, /*replicates=*/true});
  all.push_back({"no-shard in buckets", world_mesh, {.bucket_bytes = 3000}, /*replicates=*/true});
  return all;
}

/// What a program gets that asks for nothing else: sweeps over strategies always take it.
inline bool is_default(const Strategy& strategy) { return strategy.name == "full ragged"; }

inline void shard_model(Net& net, const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    if (strategy.replicates) {
      replicate(module, mesh, strategy.options);
    } else {
      fully_shard(module, mesh, strategy.options);
    }
  };
  for (auto& block : *net->blocks) wrap(*block);
  wrap(*net);
}

/// This rank's part of a step's global batch.
inline torch::Tensor own_batch(int64_t step) { return part_of(global_batch(step), world_rank(), world_size()); }

/// On the CPU.
inline torch::Tensor full(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return (is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor.detach()).cpu();
}

inline torch::Tensor mean_over_ranks(torch::Tensor value) {
  const auto mesh = world_mesh();
  value = value.detach().clone().reshape({1}).to(mesh.device());
  mesh.communicator(0)->all_reduce(value, ReduceOp::kAvg, "loss").wait();
  return value;
}

/// Largest absolute difference of the full parameters of two models with the same names.
inline double parameter_difference(const torch::nn::Module& sharded, const torch::nn::Module& plain) {
  double difference = 0;
  const auto expected = plain.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const auto got = full(item.value());
    if (got.numel() > 0)
      difference = std::max(difference, (got - expected[item.key()].detach().cpu()).abs().max().item<double>());
  }
  return difference;
}

} // namespace tessera::testing
