#include <tessera/fsdp/setup/group_making.h>

#include <ATen/core/grad_mode.h>

#include <exception>
#include <limits>
#include <utility>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/model/gradient_hooks.h>
#include <tessera/offload/make_offload_memory.h>

namespace tessera::internal {

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first, const DeviceMesh& mesh) {
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: the parameter ", name, problem...);
  };
  if (dtensor_meta(parameter)) check_parallel(parameter, name, mesh);
  check(parameter.layout() == at::kStrided, " has the layout ", parameter.layout(), ", but only dense parameters can be sharded");
  check(!parameter.is_quantized(), " is quantized, but only dense parameters can be sharded");
  check(!parameter.is_inference(), " was made in InferenceMode, whose tensors cannot be sharded; build the module outside of it");
  check(parameter.is_leaf(), " is no leaf: it was computed from other tensors");
  check(!parameter.grad().defined(), " has a gradient already; call zero_grad() before fully_shard");
  check(parameter.is_meta() == first.is_meta(), " is on ", parameter.device(), " while others of its group are on ",
        first.device(), "; build the whole module on the meta device or none of it");
}

void move_buffers(const std::vector<Registered>& buffers, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, visit, key] : buffers) {
    if (buffer.defined() && !buffer.is_meta() && buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

namespace {

using Bucket = std::span<const FreeParameter>;

/// Neighbouring parameters of at most `bytes` together, or one alone.
std::vector<Bucket> buckets_of(std::span<const FreeParameter> all, int64_t bytes) {
  std::vector<Bucket> buckets;
  int64_t taken = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto size = static_cast<int64_t>(all[i].values().nbytes());
    if (buckets.empty() || taken + size > bytes) {
      buckets.push_back(all.subspan(i, 0));
      taken = 0;
    }
    taken += size;
    buckets.back() = {buckets.back().data(), buckets.back().size() + 1};
  }
  return buckets;
}

std::shared_ptr<ParameterGroup> make_group(const std::shared_ptr<ShardedModule>& state, Bucket parameters, size_t number,
                                           const std::shared_ptr<ModelResources>& resources, const Stages& stages,
                                           std::shared_ptr<OffloadMemory> memory) {
  auto group = std::make_shared<ParameterGroup>(state, state->roles(), stages, state->options(), resources);
  group->bucket = number;
  group->shard(parameters, std::move(memory));
  redirect_gradients(*group);
  return group;
}

/// Reserves memory for each bucket of a call's parameters, and for their gradients; null means the device's memory. An error on
/// every rank where it fails on one.
std::vector<std::shared_ptr<OffloadMemory>> reserve_memory(const FullyShardOptions& options, const MeshRoles& roles,
                                                           const std::vector<Bucket>& buckets) {
  std::vector<std::shared_ptr<OffloadMemory>> memories(buckets.size());
  const auto& mesh = roles.mesh();
  const auto memory = options.offload.memory;
  if (memory == OffloadPolicy::Memory::kDevice || (memory == OffloadPolicy::Memory::kHost && mesh.device().is_cpu()))
    return memories;
  std::string failure;
  try {
    for (size_t i = 0; i < buckets.size(); ++i) {
      memories[i] = make_offload_memory(options.offload, mesh.device());
      const auto bytes = shard_bytes_of(buckets[i], options.layout, roles);
      memories[i]->reserve(2 * whole_pages(bytes));
    }
  } catch (const std::exception& error) {
    failure = error_text(error);
  }
  throw_failures(failure, *mesh.flatten().communicator(), mesh.device(), "fully_shard's memory");
  return memories;
}

} // namespace

std::vector<std::shared_ptr<ParameterGroup>> make_groups(const std::shared_ptr<ShardedModule>& state,
                                                         std::span<const FreeParameter> all,
                                                         const std::shared_ptr<ModelResources>& resources, const Stages& stages) {
  const auto& roles = state->roles();
  const bool has_buckets = !roles.shards() && !stages.reductions.empty();
  const auto buckets = buckets_of(all, has_buckets ? state->options().bucket_bytes : std::numeric_limits<int64_t>::max());
  const auto memories = reserve_memory(state->options(), roles, buckets);
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (size_t i = 0; i < buckets.size(); ++i) groups.push_back(make_group(state, buckets[i], i, resources, stages, memories[i]));
  state->set_groups(groups);
  if (!memories.empty() && memories[0]) release_freed_memory();
  return groups;
}

} // namespace tessera::internal
