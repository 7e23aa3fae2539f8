#include <tessera/offload/offload_memory.h>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>

#include <tessera/base/tensor_over.h>

namespace tessera::internal {

MovedTensors start_move(OffloadMemory& memory, const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kAlignment = 16;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    offsets.push_back(bytes);
    bytes += at::round_up(static_cast<int64_t>(tensor.nbytes()), kAlignment);
  }
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes));
  MovedTensors moved;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    const auto strides = tensor.is_non_overlapping_and_dense() ? tensor.strides() : c10::IntArrayRef();
    moved.tensors.push_back(tensor_over(storage, offsets[i], tensor.sizes(), tensor.scalar_type(), {}, strides));
  }
  moved.copy = memory.store(tensors, moved.tensors);
  return moved;
}

std::vector<at::Tensor> move_to(OffloadMemory& memory, const std::vector<at::Tensor>& tensors) {
  auto moved = start_move(memory, tensors);
  if (moved.copy) moved.copy->wait();
  return std::move(moved.tensors);
}

} // namespace tessera::internal
