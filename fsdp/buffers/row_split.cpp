#include <tessera/fsdp/buffers/row_split.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes_copy.h>

#include <algorithm>
#include <utility>

#include <tessera/base/tensor_over.h>

namespace tessera::internal {

void RowSplit::copy(int64_t begin, at::Tensor destination) { columns_.push_back({begin, std::move(destination)}); }

void RowSplit::run() {
  const int64_t rows = rows_.size(0);
  std::vector<int64_t> gaps, sizes; // a gap before each of the columns, and one behind all
  int64_t end = 0;
  for (const auto& [begin, destination] : columns_) {
    gaps.push_back(begin - end);
    end = begin + destination.size(1);
  }
  gaps.push_back(rows_.size(1) - end);
  const int64_t largest = *std::max_element(gaps.begin(), gaps.end());
  const auto unused = at::empty({rows * largest}, rows_.options());
  std::vector<at::Tensor> destinations;
  const auto add = [&](at::Tensor destination) {
    if (destination.numel() == 0) return;
    sizes.push_back(destination.size(1));
    destinations.push_back(std::move(destination));
  };
  for (size_t i = 0; i < gaps.size(); ++i) {
    add(tensor_over(unused.storage(), 0, {rows, gaps[i]}, rows_.scalar_type()));
    if (i < columns_.size()) add(std::move(columns_[i].destination));
  }
  columns_.clear();
  at::split_with_sizes_copy_out(destinations, rows_, sizes, /*dim=*/1);
}

} // namespace tessera::internal
