#include <tessera/fsdp/buffers/memory_range.h>

#include <algorithm>

namespace tessera::internal {

std::optional<MemoryRange> MemoryRange::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta() || tensor.numel() == 0) return std::nullopt;
  return MemoryRange(tensor);
}

MemoryRange::MemoryRange(const at::Tensor& tensor)
    : owner_(tensor.storage().getWeakStorageImpl()), run_bytes_(static_cast<int64_t>(tensor.itemsize())) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0)
      steps_.push_back({tensor.size(dim), tensor.stride(dim) * static_cast<int64_t>(tensor.itemsize())});
  }
  begin_ = tensor.storage_offset() * run_bytes_;
  end_ = begin_ + run_bytes_;
  for (const auto& dim : steps_) end_ += (dim.size - 1) * dim.stride;
  std::sort(steps_.begin(), steps_.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  while (!steps_.empty() && steps_.back().stride == run_bytes_) {
    run_bytes_ *= steps_.back().size;
    steps_.pop_back();
  }
}

std::vector<int64_t> MemoryRange::runs() const {
  std::vector<int64_t> begins{begin_};
  for (const auto& dim : steps_) {
    const auto known = begins.size();
    for (int64_t i = 1; i < dim.size; ++i) {
      for (size_t each = 0; each < known; ++each) begins.push_back(begins[each] + i * dim.stride);
    }
  }
  std::sort(begins.begin(), begins.end());
  return begins;
}

bool MemoryRange::overlaps(const MemoryRange& other) const {
  if (storage() != other.storage() || begin_ >= other.end_ || other.begin_ >= end_) return false;
  const auto mine = runs(), theirs = other.runs();
  for (auto a = mine.begin(), b = theirs.begin(); a != mine.end() && b != theirs.end();) {
    if (*a < *b + other.run_bytes_ && *b < *a + run_bytes_) return true;
    *a < *b ? void(++a) : void(++b);
  }
  return false;
}

} // namespace tessera::internal
