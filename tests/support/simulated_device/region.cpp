#include <tessera/tests/support/simulated_device/region.h>

#include <algorithm>

namespace tessera::testing::sim {

Region Region::of(const at::Tensor& tensor) {
  const auto element_size = static_cast<int64_t>(tensor.element_size());
  const auto* begin = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * element_size;
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  Region region(begin, begin + (last + 1) * element_size);
  if (tensor.is_non_overlapping_and_dense()) return region;
  region.element_size_ = element_size;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 1 || tensor.stride(dim) == 0) continue;
    region.sizes_.push_back(tensor.size(dim));
    region.byte_strides_.push_back(tensor.stride(dim) * element_size);
  }
  return region;
}

template <typename Visit>
void Region::for_each_element(const Visit& visit) const {
  std::vector<int64_t> index(sizes_.size(), 0);
  const char* at = begin_;
  for (;;) {
    visit(at);
    size_t dim = sizes_.size();
    for (; dim > 0; --dim) {
      at += byte_strides_[dim - 1];
      if (++index[dim - 1] < sizes_[dim - 1]) break;
      at -= byte_strides_[dim - 1] * sizes_[dim - 1];
      index[dim - 1] = 0;
    }
    if (dim == 0) return;
  }
}

bool Region::overlaps(const Region& other) const {
  const auto* const begin = std::max(begin_, other.begin_);
  const auto* const end = std::min(end_, other.end_);
  if (begin >= end) return false;
  if (sizes_.empty() && other.sizes_.empty()) return true;
  if (sizes_.empty()) return other.overlaps(*this);
  std::vector<bool> mine(static_cast<size_t>(end - begin), false);
  const auto clamp = [&](const char* at) { return std::clamp(at, begin, end) - begin; };
  for_each_element([&](const char* at) { std::fill(mine.begin() + clamp(at), mine.begin() + clamp(at + element_size_), true); });
  if (other.sizes_.empty()) return std::find(mine.begin(), mine.end(), true) != mine.end();
  bool found = false;
  other.for_each_element([&](const char* at) {
    const auto last = mine.begin() + clamp(at + other.element_size_);
    found = found || std::find(mine.begin() + clamp(at), last, true) != last;
  });
  return found;
}

bool Region::covers(const Region& other) const {
  if (*this == other) return true;
  return sizes_.empty() && begin_ <= other.begin_ && other.end_ <= end_;
}

} // namespace tessera::testing::sim
