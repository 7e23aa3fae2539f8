#include <tessera/collectives/communicator.h>

#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

namespace tessera {

Work Communicator::reduce_scatter_scaled(const at::Tensor& /*output*/, const at::Tensor& input, double /*factor*/,
                                         std::string_view label) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "reduce_scatter_scaled '", label, "' of group ", name_, ": this communicator scales no ",
                              input.scalar_type());
}

Work Communicator::send(const at::Tensor& /*tensor*/, int /*to*/, std::string_view label) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "send '", label, "' of group ", name_,
                              ": this communicator has no messages between two ranks");
}

Work Communicator::receive(const at::Tensor& /*tensor*/, int /*from*/, std::string_view label) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "receive '", label, "' of group ", name_,
                              ": this communicator has no messages between two ranks");
}

/// A call that differs from theirs.
void Communicator::give_up(std::string_view cause) {
  const auto byte = at::zeros({1}, at::TensorOptions(at::kByte).device(device_type_));
  all_gather_into(at::zeros({size()}, byte.options()), byte, cause).wait();
}

c10::DataPtr Communicator::allocate(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "allocate of group ", name_, ": ", bytes, " bytes");
  return c10::GetAllocator(device_type_)->allocate(static_cast<size_t>(bytes));
}

} // namespace tessera
