#include <tessera/fsdp/call.h>

#include <torch/csrc/autograd/graph_task.h>

#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

ForwardScope::~ForwardScope() {
  if (torch::autograd::get_current_graph_task_id() >= 0) return; // recompute: backward still reads the parameters
  try {
    for (const auto& state : handle_.state()->subtree()) {
      const auto group = state->group();
      if (group && state->reshards_after_forward()) state->schedule()->reshard(*group);
    }
  } catch (const std::exception&) {
    // A gather that failed reports itself at the next read; a destructor must not.
  }
}

namespace fsdp_internal {

namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

} // namespace

at::Tensor cast_input(const FSDPModule& handle, const at::Tensor& tensor) {
  const auto& policy = handle.state()->options().mixed_precision;
  return policy.cast_forward_inputs ? cast(tensor, policy.param_dtype) : tensor;
}

at::Tensor cast_output(const FSDPModule& handle, const at::Tensor& tensor) {
  return cast(tensor, handle.state()->options().mixed_precision.output_dtype);
}

} // namespace fsdp_internal

} // namespace tessera
