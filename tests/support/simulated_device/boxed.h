#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

using c10::IValue;
using torch::jit::Stack;

inline bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;
/// `value` with every tensor in it replaced: of a tensor, a list of tensors or of optional ones. Others are returned as they are.
IValue map_tensors(const IValue& value, const TensorMap& map);
/// Every defined tensor in it.
void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// The arguments with tensors mapped, and devices and generators of this device replaced by `type`'s and the CPU's.
Stack map_arguments(const Stack& arguments, c10::DeviceType type, const TensorMap& map);

/// Runs the operator on the arguments, and returns its results.
Stack call(const c10::OperatorHandle& op, Stack arguments);

/// Tensors over the memory (on the CPU) or the layout alone (on meta) of tensors of the device. They own nothing, as the pointers
/// of a kernel do not. Those that share a storage share one here too.
class Aliases {
 public:
  explicit Aliases(c10::DeviceType type) : type_(type) {}
  at::Tensor of(const at::Tensor& tensor);

 private:
  c10::Storage storage_of(const c10::Storage& storage);

  c10::DeviceType type_;
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> made_;
};

} // namespace tessera::testing::sim
