#include "common/sharding.h"

#include <tessera/fsdp/fully_shard.h>

#include "common/ranks.h"

namespace examples {
namespace {

c10::ScalarType dtype(Precision precision) {
  switch (precision) {
    case Precision::kBf16: return c10::kBFloat16;
    case Precision::kFp16: return c10::kHalf;
    case Precision::kFp32: break;
  }
  return c10::kFloat;
}

} // namespace

tessera::FullyShardOptions shard_options(const JobOptions& options) {
  tessera::FullyShardOptions result;
  result.strategy = options.strategy;
  result.layout = options.layout;
  result.reshard_after_forward = options.reshard_after_forward;
  result.communication = options.communication;
  if (options.precision != Precision::kFp32) {
    result.mixed_precision.param_dtype = dtype(options.precision);
    result.mixed_precision.reduce_dtype = dtype(options.reduce_precision);
  }
  return result;
}

tessera::DeviceMesh make_mesh(const JobOptions& options) {
  if (!options.strategy) return {};
  auto [shape, names] = mesh_shape(options, world_size());
  return tessera::init_device_mesh(options.device, std::move(shape), std::move(names));
}

void shard_module(torch::nn::Module& module, const tessera::DeviceMesh& mesh, const JobOptions& options) {
  tessera::fully_shard(module, mesh, shard_options(options));
}

} // namespace examples
