#include <tessera/fsdp/call.h>

#include <tessera/dtensor/dispatch/meet_plain.h>
#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reads/parameter_view.h>
#include <tessera/fsdp/unsharded.h>

namespace tessera {

namespace {

/// Null for a module without sharded parameters: there is nothing to do in a forward of it.
std::shared_ptr<internal::ShardedModule> state_if_sharded(const torch::nn::Module& module) {
  auto state = internal::find_state(module);
  return state || !internal::any_parameter(module, internal::parameter_meta) ? state : fsdp(module).state(); // which throws
}

} // namespace

ForwardScope::ForwardScope(const torch::nn::Module& module) : state_(state_if_sharded(module)), module_(&module) {
  if (!state_) return;
  const internal::ModelLock lock(state_->schedule()->mutex());
  state_->begin_forward();
}

ForwardScope::~ForwardScope() {
  if (!state_ || internal::in_backward()) return; // recompute: backward still reads the parameters
  try {
    const internal::ModelLock lock(state_->schedule()->mutex());
    const bool has_ended = state_->end_forward(module_);
    for (const auto& state : state_->subtree()) {
      if (state == state_ && !has_ended) continue;
      if (!state->reshards_after_forward()) continue;
      for (const auto& group : state->groups()) state->schedule()->reshard_after_forward(lock, *group);
    }
  } catch (const std::exception&) {
    // A gather that failed reports itself at the next read; a destructor must not.
  }
}

namespace internal {

namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

} // namespace

CallScope::CallScope(const torch::nn::Module& module) : state_(state_if_sharded(module)), forward_(module) {
  if (!state_) return;
  const ModelLock lock(state_->schedule()->mutex());
  input_dtype_ = state_->boundary_dtype();
  state_->enter_call();
}

CallScope::~CallScope() {
  if (!state_) return;
  const ModelLock lock(state_->schedule()->mutex());
  state_->leave_call();
}

at::Tensor CallScope::cast_input(const at::Tensor& tensor) const { return cast(tensor, input_dtype_); }

at::Tensor CallScope::cast_output(const at::Tensor& tensor) const {
  if (!state_) return tensor;
  const auto whole = parameter_view(tensor) ? unsharded(tensor) : dispatch::whole_if_computed(tensor);
  return cast(whole, state_->options().mixed_precision.output_dtype);
}

} // namespace internal

} // namespace tessera
