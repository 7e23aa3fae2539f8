#include "gpt/context.h"

#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include "common/ranks.h"
#include "common/sharding.h"

namespace gpt {

Meshes make_meshes(const Options& options) {
  const bool splits_layers = options.tensor_parallel.has_value();
  if (options.context_ranks == 1) return {examples::make_mesh(options), {}, splits_layers};
  const auto world = examples::world_size();
  auto [shape, names] = examples::mesh_shape(options, world);
  if (splits_layers) {
    shape.pop_back();
    names.pop_back();
  }
  const auto all = tessera::init_device_mesh(
      options.device, {options.data_ranks(world), options.context_ranks, options.tensor_parallel.value_or(1)},
      {"data", "cp", "tp"});
  const auto sharding = all[{"data", "cp"}].flatten("ranks").unflatten(0, shape, names);
  return {splits_layers ? tessera::DeviceMesh::concatenate({sharding, all["tp"]}) : sharding, all["cp"], splits_layers};
}

torch::Tensor loss_of(Gpt& model, const Batch& batch, const Meshes& meshes, tessera::ContextParallel scheme) {
  if (!meshes.context.defined()) return cross_entropy(model->forward(batch.inputs), batch.targets);
  const auto parts = tessera::split_sequence({batch.inputs, batch.targets}, {1, 1}, meshes.context);
  const auto inputs = parts.tensors[0], targets = parts.tensors[1]; // parts of one size: the loss is a mean of means
  if (meshes.has_tensor_parallelism) {                              // beside which parts are plain
    const tessera::ContextParallelScope scope(scheme, parts.mesh);
    return cross_entropy(model->forward(inputs.local(), tessera::to_local(parts.positions)), targets.local());
  }
  const tessera::ContextParallelScope scope(scheme);
  return cross_entropy(tessera::to_local(model->forward(inputs, parts.positions)), targets.local());
}

} // namespace gpt
