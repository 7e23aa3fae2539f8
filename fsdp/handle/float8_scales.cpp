#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <absl/algorithm/container.h>

#include <utility>
#include <vector>

#include <tessera/fsdp/communication/float8_gather.h>
#include <tessera/fsdp/group/model_lock.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/schedule/schedule.h>
#include <tessera/nn/float8_codes.h>

namespace tessera {

namespace internal {

namespace {

/// The weights in fp8 whose other parts the same ranks have.
struct Float8Batch {
  struct Weight {
    ParameterGroup* group;
    Float8Gather* gather; ///< the group's
    at::Tensor shard;
  };
  std::vector<CommunicatorPtr> communicators;
  std::vector<Weight> weights;
  std::vector<at::Tensor> largest;
};

bool is_offloaded(const ParameterGroup& group) {
  return state_of_group(group).options().offload.memory != OffloadPolicy::Memory::kDevice;
}

/// The groups that have parameters of `module`, in their order, which all ranks have.
std::vector<ParameterGroup*> groups_below(const torch::nn::Module& module) {
  std::vector<ParameterGroup*> groups;
  any_parameter(module, [&](const at::Tensor& parameter) {
    const auto* const meta = parameter_meta(parameter);
    if (meta && meta->group && !absl::c_linear_search(groups, meta->group)) groups.push_back(meta->group);
    return false;
  });
  return groups;
}

void add_weights_in_float8(ParameterGroup* group, std::vector<Float8Batch>& batches) {
  const ModelLock lock(schedule_of(*group).mutex());
  for (size_t i = 0; i < group->parameters().size(); ++i) {
    auto* const gather = dynamic_cast<Float8Gather*>(group->gather().extended().extension_of(i).get());
    if (!gather || is_offloaded(*group)) continue;
    auto communicators = gather->communicators();
    auto batch = absl::c_find_if(batches, [&](const auto& each) { return each.communicators == communicators; });
    if (batch == batches.end()) batch = batches.insert(batches.end(), Float8Batch{.communicators = std::move(communicators)});
    batch->weights.push_back({group, gather, group->parameters()[i].local});
    batch->largest.push_back(Float8Gather::largest_of(batch->weights.back().shard));
  }
}

void make_float8_scales(const Float8Batch& batch) {
  const auto largest = at::cat(batch.largest);
  Float8Gather::reduce(largest, batch.communicators);
  const auto scales = float8_scale(largest, at::kFloat8_e4m3fn);
  for (size_t i = 0; i < batch.weights.size(); ++i) {
    const auto& [group, gather, shard] = batch.weights[i];
    const ModelLock lock(schedule_of(*group).mutex());
    gather->know(shard, scales.narrow(0, static_cast<int64_t>(i), 1));
  }
}

} // namespace

} // namespace internal

void precompute_float8_scales(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto groups = internal::groups_below(module);
  TORCH_CHECK_VALUE(!groups.empty(), "precompute_float8_scales: fully_shard has not taken ", module.name(),
                    ", nor a module below it");
  std::vector<internal::Float8Batch> batches;
  for (auto* const group : groups) internal::add_weights_in_float8(group, batches);
  for (const auto& batch : batches) internal::make_float8_scales(batch);
}

} // namespace tessera
