#include <tessera/fsdp/fsdp_module.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera {

namespace {

using internal::for_each_group;
using internal::GroupGradients;
using internal::PrefetchSettings;
using internal::ShardedModule;

/// Also applies to groups of other models, whose modules lie below.
template <typename Apply> // void(GroupGradients&)
void for_each_group_below(ShardedModule& state, bool recurse, const Apply& apply) {
  for_each_group(state, recurse, apply);
  if (!recurse) return;
  for (const auto& other : internal::foreign_modules_below(state)) for_each_group(*other, false, apply);
}

/// What `torch::nn::Module::zero_grad` does.
void clear_gradients(const torch::nn::Module& module, bool set_to_none) {
  for (const auto& parameter : module.parameters()) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    gradient = set_to_none ? at::Tensor() : gradient.detach().zero_();
  }
}

/// One whose strategy keeps the parameters whole has nothing to free.
void set_resharding(const internal::Held& held, ShardedModule& state, bool reshard) {
  if (reshard && state.roles().keeps_parameters()) return;
  state.set_reshard_after_forward(reshard);
  for (const auto& group : state.groups()) group->forget_after_forward(held);
}

PrefetchSettings::Groups groups_of(const ShardedModule& state, const std::vector<FSDPModule>& modules, const char* function) {
  TORCH_CHECK_VALUE(state.group(), function, ": the module ", state.label(),
                    " has no parameters of its own, so that nothing reads them: set the list on a module below or above it");
  PrefetchSettings::Groups groups;
  for (const auto& module : modules) {
    const auto& other = *module.state();
    TORCH_CHECK_VALUE(other.schedule() == state.schedule(), function, " of ", state.label(), ": the module ", other.label(),
                      " belongs to another model: call fully_shard on the module above both first");
    if (const auto group = other.group()) groups.push_back(group);
  }
  return groups;
}

void check_same_ranks(const CommunicatorPtr& communicator, const CommunicatorPtr& present, const char* function,
                      const std::string& label) {
  TORCH_CHECK_VALUE(communicator, function, ": the communicator is null");
  TORCH_CHECK_VALUE(present, function, ": ", label, " has no such collective, on one rank or by its strategy");
  TORCH_CHECK_VALUE(communicator->rank_list() == present->rank_list(), function, ": the communicator has the ranks ",
                    c10::IntArrayRef(communicator->ranks()), ", but the shard dim of ", label, " has ",
                    c10::IntArrayRef(present->ranks()));
}

} // namespace

void FSDPModule::unshard() { unshard_async().wait(); }

UnshardHandle FSDPModule::unshard_async() {
  for (const auto& group : state_->groups()) state_->schedule()->start_unshard(*group);
  return UnshardHandle(state_);
}

void UnshardHandle::wait() {
  for (const auto& group : state_->groups()) state_->schedule()->finish_unshard(*group);
}

void FSDPModule::reshard() {
  for (const auto& group : state_->groups()) state_->schedule()->reshard(*group);
}

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  for_each_group_below(*state_, recurse, [&](GroupGradients& gradients) {
    gradients.settings.requires_sync = gradients.settings.requires_all_reduce = requires_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_group_below(*state_, recurse,
                       [&](GroupGradients& gradients) { gradients.settings.requires_all_reduce = requires_all_reduce; });
}

void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  const internal::ModelLock lock(state_->schedule()->mutex());
  state_->schedule()->look_anew(lock);
  if (!recurse) return set_resharding(lock, *state_, reshard);
  for (const auto& each : state_->subtree()) set_resharding(lock, *each, reshard);
}

void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_each_group(*state_, recurse, [&](GroupGradients& gradients) { gradients.settings.reshard_after_backward = reshard; });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  const internal::ModelLock lock(state_->schedule()->mutex());
  state_->prefetch_settings().is_prefetched_in_backward = unshard_in_backward;
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  const internal::ModelLock lock(state_->schedule()->mutex());
  state_->prefetch_settings().in_forward = groups_of(*state_, modules, "set_modules_to_forward_prefetch");
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  const internal::ModelLock lock(state_->schedule()->mutex());
  state_->prefetch_settings().in_backward = groups_of(*state_, modules, "set_modules_to_backward_prefetch");
}

void FSDPModule::set_prefetch_depth(int64_t groups, bool recurse) {
  TORCH_CHECK_VALUE(groups >= 0, "set_prefetch_depth: ", groups, " groups cannot be gathered ahead, on rank ",
                    process_context().rank());
  const internal::ModelLock lock(state_->schedule()->mutex());
  if (!recurse) return void(state_->prefetch_settings().depth = groups);
  for (const auto& each : state_->subtree()) each->prefetch_settings().depth = groups;
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t buffers, bool recurse) {
  TORCH_CHECK_VALUE(buffers == 1 || buffers == 2, "set_reduce_scatter_max_input_buffers: there are 1 or 2 buffers, but ", buffers,
                    " were asked for on rank ", process_context().rank());
  for_each_group(*state_, recurse, [&](GroupGradients& gradients) { gradients.settings.has_only_buffer = buffers == 1; });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  const auto check = [](const internal::GroupGradients& gradients) {
    TORCH_CHECK(gradients.settings.takers.empty(), gradients.group().label(),
                " is stepped in its backward (step_in_backward), and would be stepped after set_is_last_backward(false): "
                "accumulate in no_sync");
  };
  if (!is_last_backward) internal::for_each_group(*state_, /*recurse=*/true, check);
  state_->schedule()->set_is_last_backward(is_last_backward);
}

void FSDPModule::zero_grad(bool set_to_none) {
  TORCH_CHECK(!internal::in_backward(), "zero_grad of ", state_->label(), " is called in a backward, on rank ",
              process_context().rank(), ": call it between the steps");
  std::vector<std::shared_ptr<internal::ParameterGroup>> groups = state_->subtree_groups();
  for (const auto& other : internal::foreign_modules_below(*state_)) {
    for (auto& group : other->groups()) groups.push_back(std::move(group));
  }
  for (const auto& group : groups) schedule_of(*group).drop_gradients(*group);
  if (state_->is_root()) state_->schedule()->give_up_micro_batches();
  const at::NoGradGuard no_grad;
  for (const auto* module : state_->modules()) {
    if (module) clear_gradients(*module, set_to_none);
  }
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  const auto group = state_->group();
  TORCH_CHECK_VALUE(factor > 0 && std::isfinite(factor), "set_gradient_divide_factor: the factor of ",
                    group ? group->label() : "a module without a group of its own", " must be positive and finite, but is ",
                    factor, " on rank ", process_context().rank());
  state_->schedule()->forget_failed_backward();
  for_each_group(*state_, false, [&](GroupGradients& gradients) { gradients.set_divide_factor(factor); });
}

void FSDPModule::set_keeps_own_gradients(bool keeps_own, bool recurse) {
  for_each_group_below(*state_, recurse, [&](const GroupGradients& gradients) {
    const auto& group = gradients.group();
    TORCH_CHECK(!gradients.is_unfinished(), "set_keeps_own_gradients: gradients of ", group.label(), " wait for their reduction");
    for (size_t i = 0; keeps_own && i < group.parameters().size(); ++i) {
      const auto& placements = group.parameters()[i].spec->placements();
      TORCH_CHECK_VALUE(
          std::all_of(placements.begin(), placements.end(), is_replicate), "set_keeps_own_gradients: ", group.full_name(i),
          " is sharded (", to_string(placements),
          "): only gradients of parameters that every rank has whole (replicate, Strategy::kNoShard) stay unreduced");
    }
  });
  for_each_group_below(*state_, recurse, [&](GroupGradients& gradients) { gradients.settings.keeps_own = keeps_own; });
}

void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream) {
  TORCH_CHECK_VALUE(!stream || stream->device() == mesh().device(), "set_all_reduce_hook: the stream is of ", stream->device(),
                    ", but ", state_->label(), " lies on ", mesh().device());
  state_->schedule()->forget_failed_backward();
  for_each_group(*state_, false, [&](GroupGradients& gradients) {
    TORCH_CHECK(!gradients.is_unfinished(), "set_all_reduce_hook: gradients of ", state_->label(),
                " wait for their reduction: set it before the first backward of a step");
    gradients.settings.all_reduce_hook = hook;
    gradients.settings.hook_stream = stream;
  });
}

void FSDPModule::set_custom_all_gather(CommunicatorPtr communicator) {
  const internal::ModelLock lock(state_->schedule()->mutex());
  const auto group = state_->group();
  if (!group) return;
  check_same_ranks(communicator, group->stages().inner_gather().communicator, "set_custom_all_gather", group->label());
  group->finish_gather(lock); // one that is under way, gathered ahead perhaps
  auto& stages = group->stages(lock);
  stages.gathers[stages.innermost()].communicator = std::move(communicator);
}

void FSDPModule::set_custom_reduce_scatter(CommunicatorPtr communicator) {
  state_->schedule()->forget_failed_backward();
  const internal::ModelLock lock(state_->schedule()->mutex());
  const auto group = state_->group();
  if (!group) return;
  check_same_ranks(communicator, group->stages().reduce_scatter(), "set_custom_reduce_scatter", group->label());
  TORCH_CHECK(!state_->gradients(lock).is_unfinished(), "set_custom_reduce_scatter: gradients of ", group->label(),
              " wait for their reduction: set it before the first backward of a step");
  group->stages(lock).reductions[0].communicator = std::move(communicator);
}

void FSDPModule::set_reporting(bool reports) { state_->schedule()->set_reporting(reports); }

StepReport FSDPModule::report() { return state_->schedule()->report(); }

const DeviceMesh& FSDPModule::mesh() const { return state_->roles().mesh(); }

std::vector<std::string> FSDPModule::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& group : state_->groups()) {
    for (size_t i = 0; i < group->parameters().size(); ++i) names.push_back(group->full_name(i));
  }
  return names;
}

int64_t FSDPModule::unsharded_bytes() const {
  int64_t bytes = 0;
  for (const auto& group : state_->groups()) bytes += group->unsharded_bytes();
  return bytes;
}

int64_t FSDPModule::kept_bytes() const {
  int64_t bytes = 0;
  for (const auto& group : state_->groups()) bytes += group->gather().kept_bytes();
  return bytes;
}

} // namespace tessera
