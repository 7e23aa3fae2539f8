#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/snapshot.h>

#include <utility>

namespace tessera::checkpoint {

Snapshot snapshot_of(const StateDict& state) {
  Snapshot snapshot;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) {
      snapshot.state.values.emplace_back(entry.name, std::get<StateValue>(entry.content));
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(entry.content);
    Holding holding{entry.name, entry.aliases, tensor.scalar_type(), tensor.sizes().vec(), layout_of(tensor), true, {}};
    holding.plain = holding.layout == "plain";
    safetensors_dtype(holding.dtype, "checkpoint: tensor \"" + entry.name + "\"");
    auto& data = snapshot.data.emplace_back();
    for (auto& piece : pieces_of(entry.name, tensor)) {
      holding.boxes.push_back(std::move(piece.box));
      data.push_back(std::move(piece.data));
    }
    snapshot.state.tensors.push_back(std::move(holding));
  }
  return snapshot;
}

Snapshot HostCopies::copy(const Snapshot& snapshot) {
  const c10::NoGradGuard no_grad;
  Snapshot copy{snapshot.state, {}};
  size_t used = 0;
  for (const auto& pieces : snapshot.data) {
    auto& copies = copy.data.emplace_back();
    for (const auto& piece : pieces) {
      if (used == memory_.size()) memory_.emplace_back();
      auto& memory = memory_[used++];
      const bool fits = memory.defined() && memory.sizes() == piece.sizes() && memory.scalar_type() == piece.scalar_type();
      if (!fits) memory = at::empty(piece.sizes(), piece.options().device(at::kCPU).pinned_memory(!piece.is_cpu()));
      copies.push_back(memory.copy_(piece));
    }
  }
  memory_.resize(used);
  return copy;
}

} // namespace tessera::checkpoint
