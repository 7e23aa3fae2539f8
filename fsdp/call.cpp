#include <tessera/fsdp/call.h>

#include <tessera/dtensor/dispatch/meet_plain.h>
#include <tessera/dtensor/in_backward.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

ForwardScope::ForwardScope(const torch::nn::Module& module) : handle_(fsdp(module)), module_(&module) {
  const auto lock = handle_.state()->schedule()->lock();
  handle_.state()->begin_forward();
}

ForwardScope::~ForwardScope() {
  if (internal::in_backward()) return; // recompute: backward still reads the parameters
  try {
    const auto lock = handle_.state()->schedule()->lock();
    const bool has_ended = handle_.state()->end_forward(module_);
    for (const auto& state : handle_.state()->subtree()) {
      if (state == handle_.state() && !has_ended) continue;
      if (!state->reshards_after_forward()) continue;
      for (const auto& group : state->groups()) state->schedule()->reshard_after_forward(*group);
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

CallScope::CallScope(const torch::nn::Module& module) : handle_(fsdp(module)), forward_(module) {
  const auto lock = handle_.state()->schedule()->lock();
  input_dtype_ = handle_.state()->boundary_dtype();
  handle_.state()->enter_call();
}

CallScope::~CallScope() {
  const auto lock = handle_.state()->schedule()->lock();
  handle_.state()->leave_call();
}

at::Tensor CallScope::cast_input(const at::Tensor& tensor) const { return cast(tensor, input_dtype_); }

at::Tensor CallScope::cast_output(const at::Tensor& tensor) const {
  return cast(dispatch::whole_if_computed(tensor), handle_.state()->options().mixed_precision.output_dtype);
}

} // namespace internal

} // namespace tessera
