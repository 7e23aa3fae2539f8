#pragma once

// A small network that may be tensor-parallel, and fully_shard over the dims of a mesh besides.

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/distribute_module.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// A column-parallel layer, a row-parallel one, and a norm whose weights all ranks have. Plain tensors go in and out.
struct ParallelMlpImpl : torch::nn::Module {
  ParallelMlpImpl(int64_t hidden, uint64_t seed) {
    torch::manual_seed(seed);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    up = register_module("up", torch::nn::Linear(6, hidden));
    down = register_module("down", torch::nn::Linear(hidden, 6));
    scale = register_parameter("scale", torch::ones({}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto input = tensor_parallel.defined() ? from_local(x, tensor_parallel, {Replicate{}}) : x;
    auto output = down->forward(torch::gelu(up->forward(norm->forward(input)))) * scale;
    if (!tensor_parallel.defined()) return x + output;
    return x + to_local(DTensor(output).redistribute({Replicate{}}));
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::Tensor scale;
  DeviceMesh tensor_parallel; ///< undefined: the layers are plain
};
TORCH_MODULE(ParallelMlp);

struct ParallelNetImpl : torch::nn::Module {
  ParallelNetImpl(int64_t hidden, uint64_t seed) {
    for (uint64_t i = 0; i < 2; ++i)
      layers.emplace_back(register_module("layer" + std::to_string(i), ParallelMlp(hidden, seed + i)));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    if (!tensor_parallel.defined()) return head->forward(x);
    return to_local(head->forward(from_local(x, tensor_parallel, {Replicate{}})));
  }

  std::vector<ParallelMlp> layers;
  torch::nn::Linear head{nullptr};
  DeviceMesh tensor_parallel;
};
TORCH_MODULE(ParallelNet);

inline void make_parallel(ParallelNet& net, const DeviceMesh& mesh) {
  for (auto& layer : net->layers) {
    distribute_module(*layer, mesh, [](const std::string& name, const torch::Tensor&) -> Placements {
      if (name == "up.weight" || name == "up.bias") return {Shard{0}};
      if (name == "down.weight") return {Shard{1}};
      return {Replicate{}};
    });
    layer->tensor_parallel = mesh;
  }
  distribute_module(*net->head, mesh);
  net->tensor_parallel = mesh;
}

/// A mesh whose last dim is "tp"; those before it are for `fully_shard`.
struct ParallelMesh {
  explicit ParallelMesh(const std::vector<int64_t>& shape)
      : all(init_device_mesh(
            test_device_type(), shape,
            shape.size() == 2 ? std::vector<std::string>{"dp", "tp"} : std::vector<std::string>{"replicate", "shard", "tp"})),
        tensor_parallel(all["tp"]),
        data_parallel(shape.size() == 2 ? all["dp"] : all[{std::string("replicate"), std::string("shard")}]) {}
  int64_t data_ranks() const { return data_parallel.size(); }
  int64_t data_rank() const {
    return data_parallel.local_rank() * (all.ndim() == 3 ? all.size(1) : 1) + (all.ndim() == 3 ? data_parallel.local_rank(1) : 0);
  }

  DeviceMesh all, tensor_parallel, data_parallel;
};

/// 2-D and 3-D meshes of so many ranks as there are.
inline std::vector<std::vector<int64_t>> parallel_shapes() {
  const auto n = world_size();
  std::vector<std::vector<int64_t>> shapes{{n, 1}, {1, n}};
  if (n == 4) shapes.insert(shapes.end(), {{2, 2}, {2, 1, 2}, {1, 2, 2}, {2, 2, 1}});
  return shapes;
}

inline void shard_parallel(ParallelNet& net, const ParallelMesh& mesh, const FullyShardOptions& options) {
  make_parallel(net, mesh.tensor_parallel);
  for (auto& layer : net->layers) fully_shard(*layer, mesh.data_parallel, options);
  fully_shard(*net, mesh.data_parallel, options);
}

} // namespace tessera::testing
