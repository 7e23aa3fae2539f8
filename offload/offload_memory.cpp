#include <tessera/offload/offload_memory.h>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>

#include <tessera/offload/aligned_memory.h>
#include <tessera/offload/tensor_over.h>

namespace tessera::internal {

std::vector<at::Tensor> move_to(OffloadMemory& memory, const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kAlignment = 16;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    offsets.push_back(bytes);
    bytes += at::round_up(static_cast<int64_t>(tensor.nbytes()), kAlignment);
  }
  const auto buffer = aligned_memory(bytes);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes));
  std::vector<at::Tensor> moved;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto over = [&, &tensor = tensors[i]](const c10::Storage& bytes_of) {
      const auto strides = tensor.is_non_overlapping_and_dense() ? tensor.strides() : c10::IntArrayRef();
      return tensor_over(bytes_of, offsets[i], tensor.sizes(), tensor.scalar_type(), {}, strides);
    };
    over(buffer).copy_(tensors[i]);
    moved.push_back(over(storage));
  }
  memory.store(tensor_over(buffer, 0, {bytes}, at::kByte), tensor_over(storage, 0, {bytes}, at::kByte));
  return moved;
}

} // namespace tessera::internal
