#pragma once

// Internal: this rank's part of a group's parameters.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/meta_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/group/model_resources.h>
#include <tessera/fsdp/layout/shard_plan.h>
#include <tessera/offload/offload_memory.h>

namespace tessera::internal {

/// Bytes in which the parameters' local tensors lie, the versions of these, and where the shard is offloaded a copy of it on the
/// device. A part of its group.
class GroupShard {
 public:
  /// The shard lies in `memory`, or in the device's own where that is null.
  void plan(ShardPlan plan, std::shared_ptr<OffloadMemory> memory) {
    plan_ = std::move(plan);
    memory_ = std::move(memory);
  }
  const ShardPlan& plan() const { return plan_; }
  const std::shared_ptr<OffloadMemory>& memory() const { return memory_; }

  /// Makes new memory, in which no local tensor lies.
  void allocate(c10::Device device) {
    if (memory_ && !device.is_meta()) {
      const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(plan_.bytes),
                                 memory_->allocate(plan_.bytes));
      bytes_ = tensor_over(storage, 0, {plan_.bytes}, at::kByte);
    } else {
      bytes_ = at::zeros({plan_.bytes}, at::TensorOptions(at::kByte).device(device));
    }
    versions_.clear();
  }
  const at::Tensor& bytes() const { return bytes_; }
  /// Makes the local tensor of the next parameter. It is no view of the shard: a write to one parameter is none to what autograd
  /// saved of the others.
  at::Tensor make_local(c10::IntArrayRef sizes, at::ScalarType dtype, c10::IntArrayRef strides) {
    auto local = tensor_over(bytes_.storage(), plan_.offsets[versions_.size()], sizes, dtype, {}, strides);
    versions_.push_back(local.unsafeGetTensorImpl()->version_counter());
    return local;
  }
  /// Grows with every write to a local tensor.
  uint64_t version() const {
    uint64_t sum = 0; // each only grows
    for (const auto& version : versions_) sum += version.current_version();
    return sum;
  }

  /// Starts to bring an offloaded shard to the device.
  void start_fetch(ModelResources& resources) {
    if (fetch_.value.defined() && fetch_.version == version()) return;
    fetch_.copy.reset();
    // On a device the copy and its memory are of the stream that gathers from it, and frees it.
    fetch_.last = resources.streams.gather.run([&] {
      const MemoryUseScope use(MemoryUse::kUnsharded);
      const auto bytes = static_cast<int64_t>(bytes_.nbytes()), size = whole_pages(bytes) + kPageBytes;
      const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(size), resources.blocks.allocate(size));
      const auto destination = from_page(storage, bytes);
      fetch_.copy = memory_->fetch(bytes_, destination);
      fetch_.value = destination; // not where the fetch cannot begin
      return Work();
    });
    fetch_.version = version();
  }
  /// The shard on the device.
  const at::Tensor& fetched(ModelResources& resources) {
    if (!memory_) return bytes_;
    start_fetch(resources);
    if (const auto copy = std::exchange(fetch_.copy, nullptr)) {
      const auto value = std::exchange(fetch_.value, at::Tensor()); // there is none where this throws
      copy->wait();
      fetch_.value = value;
    }
    return fetch_.value;
  }
  /// The local tensor `local` in what was fetched; itself where nothing was.
  at::Tensor fetched_local(const at::Tensor& local) const {
    if (!fetch_.value.defined()) return local;
    const auto offset = fetch_.value.storage_offset() + local.storage_offset() * static_cast<int64_t>(local.itemsize());
    return tensor_over(fetch_.value.storage(), offset, local.sizes(), local.scalar_type(), {}, local.strides());
  }
  /// Nobody needs what was fetched any more.
  void release_fetched() { fetch_.value = at::Tensor(); }
  /// Forgets what is fetched, and that it was.
  void forget_fetch() { fetch_ = Fetch(); }
  /// The host waits for what a fetch still reads of the shard.
  void wait_for_fetch(const CommunicationStreams& streams) {
    if (!std::exchange(fetch_.last, Work()).is_completed()) streams.gather.synchronize();
  }

 private:
  /// A copy of an offloaded shard on the device, until it is gathered.
  struct Fetch {
    at::Tensor value = {};
    std::unique_ptr<PendingCopy> copy = {}; ///< that `value` waits for
    Work last = {};                         ///< what the copy that was started last is a part of
    uint64_t version = 0;                   ///< of the shard
  };

  ShardPlan plan_;
  std::shared_ptr<OffloadMemory> memory_;
  at::Tensor bytes_;                           ///< the locals lie in it
  std::vector<c10::VariableVersion> versions_; ///< of the locals
  Fetch fetch_;
};

} // namespace tessera::internal
