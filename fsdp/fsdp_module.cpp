#include <tessera/fsdp/fully_shard.h>

#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

namespace {

using fsdp_internal::GroupGradients;
using fsdp_internal::ShardedModule;

template <typename Apply> // void(GroupGradients&)
void for_each_group(ShardedModule& state, bool recurse, const Apply& apply) {
  for (const auto& each : recurse ? state.subtree() : std::vector<std::shared_ptr<ShardedModule>>{state.shared_from_this()}) {
    if (const auto group = each->group()) apply(group->gradients());
  }
}

} // namespace

void FSDPModule::unshard() {
  if (const auto group = state_->group()) state_->schedule()->unshard(*group);
}

void FSDPModule::reshard() {
  if (const auto group = state_->group()) state_->schedule()->reshard(*group);
}

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  for_each_group(*state_, recurse, [&](GroupGradients& gradients) { gradients.requires_sync = requires_sync; });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_group(*state_, recurse, [&](GroupGradients& gradients) { gradients.requires_all_reduce = requires_all_reduce; });
}

void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  if (!recurse) return state_->set_reshard_after_forward(reshard);
  for (const auto& each : state_->subtree()) each->set_reshard_after_forward(reshard);
}

void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_each_group(*state_, recurse, [&](GroupGradients& gradients) { gradients.reshard_after_backward = reshard; });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) { state_->schedule()->set_is_last_backward(is_last_backward); }

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0, "set_gradient_divide_factor: the factor must be positive, but is ", factor);
  for_each_group(*state_, false, [&](GroupGradients& gradients) { gradients.set_divide_factor(factor); });
}

const DeviceMesh& FSDPModule::mesh() const { return state_->axes().mesh(); }

std::vector<std::string> FSDPModule::parameter_names() const {
  std::vector<std::string> names;
  if (const auto group = state_->group()) {
    for (const auto& parameter : group->parameters()) names.push_back(parameter.name);
  }
  return names;
}

int64_t FSDPModule::unsharded_bytes() const {
  const auto group = state_->group();
  return group ? group->unsharded_bytes() : 0;
}

} // namespace tessera
