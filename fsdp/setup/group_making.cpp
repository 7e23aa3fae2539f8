#include <tessera/fsdp/setup/group_making.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <span>
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

/// The parameters of a group.
struct Bucket {
  const MeshPart* part;
  std::span<const FreeParameter> parameters;
};

/// Neighbouring parameters of at most so many bytes together, or one alone. The last are filled first: their gradients come
/// first.
std::vector<Bucket> buckets_of(const MeshPart& part, int64_t bytes, int64_t last_bytes) {
  const std::span<const FreeParameter> all = part.parameters;
  std::vector<Bucket> buckets;
  int64_t taken = 0;
  size_t end = all.size(), begin = end;
  const auto close = [&] {
    buckets.push_back({&part, all.subspan(begin, end - begin)});
    end = begin;
    taken = 0;
  };
  while (begin > 0) {
    const auto size = static_cast<int64_t>(all[begin - 1].values().nbytes());
    if (begin < end && taken + size > (buckets.empty() ? last_bytes : bytes)) close();
    taken += size;
    --begin;
  }
  close();
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

std::vector<Bucket> buckets_of(const MeshPart& part, const FullyShardOptions& options) {
  const bool has_buckets = !part.is_beside() && !part.roles->shards() && !part.stages.reductions.empty();
  if (!has_buckets) return {{&part, part.parameters}};
  return buckets_of(part, options.bucket_bytes, options.first_bucket_bytes.value_or(options.bucket_bytes));
}

std::shared_ptr<ParameterGroup> make_group(const std::shared_ptr<ShardedModule>& state, const Bucket& bucket, size_t number,
                                           const std::shared_ptr<ModelResources>& resources,
                                           std::shared_ptr<OffloadMemory> memory) {
  const auto& part = *bucket.part;
  auto group = std::make_shared<ParameterGroup>(state, *part.roles, part.stages, state->options(), resources);
  group->part = {number, part.is_beside()};
  group->shard(bucket.parameters, std::move(memory));
  redirect_gradients(*group);
  return group;
}

/// Reserves memory for each bucket of a call's parameters, and for their gradients; null means the device's memory. An error on
/// every rank where it fails on one.
std::vector<std::shared_ptr<OffloadMemory>> reserve_memory(const ShardedModule& state, const std::vector<Bucket>& buckets) {
  std::vector<std::shared_ptr<OffloadMemory>> memories(buckets.size());
  const auto& mesh = state.roles().mesh();
  const auto& options = state.options();
  const auto memory = options.offload.memory;
  if (memory == OffloadPolicy::Memory::kDevice || (memory == OffloadPolicy::Memory::kHost && mesh.device().is_cpu()))
    return memories;
  std::string failure;
  try {
    for (size_t i = 0; i < buckets.size(); ++i) {
      memories[i] = make_offload_memory(options.offload, mesh.device());
      const auto bytes = shard_bytes_of(buckets[i].parameters, options.layout, *buckets[i].part->roles);
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
                                                         std::span<const MeshPart> parts,
                                                         const std::shared_ptr<ModelResources>& resources) {
  std::vector<Bucket> buckets;
  for (const auto& part : parts) {
    for (const auto& bucket : buckets_of(part, state->options())) buckets.push_back(bucket);
  }
  const auto memories = reserve_memory(*state, buckets);
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (size_t i = 0; i < buckets.size(); ++i) groups.push_back(make_group(state, buckets[i], i, resources, memories[i]));
  state->set_groups(groups);
  if (!memories.empty() && memories[0]) release_freed_memory();
  return groups;
}

} // namespace tessera::internal
