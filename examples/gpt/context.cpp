#include "gpt/context.h"

#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include "common/ranks.h"
#include "common/sharding.h"

namespace gpt {

Meshes make_meshes(const Options& options) {
  if (options.context_ranks == 1) return {examples::make_mesh(options), {}};
  const auto world = examples::world_size();
  const auto all = tessera::init_device_mesh(options.device, {options.data_ranks(world), options.context_ranks}, {"data", "cp"});
  const auto [shape, names] = examples::mesh_shape(options, world);
  return {all.flatten("ranks").unflatten(0, shape, names), all["cp"]};
}

torch::Tensor loss_of(Gpt& model, const Batch& batch, const tessera::DeviceMesh& context, tessera::ContextParallel scheme) {
  if (!context.defined()) return cross_entropy(model->forward(batch.inputs), batch.targets);
  const auto parts = tessera::split_sequence({batch.inputs, batch.targets}, {1, 1}, context);
  const tessera::ContextParallelScope scope(scheme);
  const auto logits = model->forward(parts.tensors[0], parts.positions);
  return cross_entropy(tessera::to_local(logits), tessera::to_local(parts.tensors[1])); // of parts of one size: means of means
}

} // namespace gpt
