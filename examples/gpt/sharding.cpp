#include "gpt/sharding.h"

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>

namespace gpt {
namespace {

torch::ScalarType dtype(Precision precision) { return precision == Precision::kBf16 ? torch::kBFloat16 : torch::kFloat; }

tessera::FullyShardOptions shard_options(const Options& options) {
  tessera::FullyShardOptions result;
  result.layout = options.layout;
  result.reshard_after_forward = options.reshard_after_forward;
  if (options.precision != Precision::kFp32) {
    result.mixed_precision.param_dtype = dtype(options.precision);
    result.mixed_precision.reduce_dtype = dtype(options.reduce_precision);
  }
  return result;
}

} // namespace

tessera::DeviceMesh make_mesh(const Options& options) {
  auto [shape, names] = mesh_shape(options, tessera::process_context().world_size());
  return tessera::init_device_mesh(options.device, std::move(shape), std::move(names));
}

void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options) {
  const auto shard_one = options.strategy == Strategy::kNoShard
                             ? tessera::replicate
                             : [](torch::nn::Module& module, const tessera::DeviceMesh& where,
                                  const tessera::FullyShardOptions& how) { return tessera::fully_shard(module, where, how); };
  const auto how = shard_options(options);
  for (const auto& block : *model->blocks()) shard_one(*block, mesh, how);
  shard_one(*model, mesh, how);
}

} // namespace gpt
