#include <tessera/activations/tensor_place.h>

#include <ATen/ops/empty_like.h>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/offload/file_memory.h>

namespace tessera {

TensorPlace host_memory(bool pinned) {
  return [pinned](const at::Tensor& tensor) -> std::function<at::Tensor()> {
    if (tensor.is_cpu()) return [tensor] { return tensor; };
    const auto copy = at::empty_like(tensor, tensor.options().device(c10::kCPU).pinned_memory(pinned));
    copy.copy_(tensor, /*non_blocking=*/pinned);
    return [copy, pinned, device = tensor.device()] { return copy.to(device, /*non_blocking=*/pinned); };
  };
}

TensorPlace file_memory(const std::string& folder) {
  constexpr size_t kSmallest = size_t{64} << 10;
  return [file = internal::FileMemory::create(folder)](const at::Tensor& tensor) -> std::function<at::Tensor()> {
    if (tensor.nbytes() < kSmallest || !tensor.is_contiguous()) return [tensor] { return tensor; };
    const auto saved = internal::move_to(*file, {tensor.detach()})[0];
    return [file, saved, device = tensor.device()] {
      const auto bytes = static_cast<int64_t>(saved.nbytes());
      const auto buffer = internal::aligned_memory(bytes);
      file->fetch(internal::tensor_over(saved.storage(), 0, {bytes}, at::kByte),
                  internal::tensor_over(buffer, 0, {bytes}, at::kByte))
          ->wait();
      return internal::tensor_over(buffer, 0, saved.sizes(), saved.scalar_type()).to(device);
    };
  };
}

} // namespace tessera
