#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera {

/// A dataset of LibTorch as random-access data: `RowSource(DatasetRows(dataset.map(Stack<>())), mesh, options)`. Its batches are
/// what the dataset's `get_batch` returns: of one mapped with `Stack<>`, one `Example<>` with a row for each index.
///
/// As LibTorch's DataLoader does, each thread that reads at the same time as others has a copy of the dataset of its own.
template <typename Dataset>
class DatasetRows {
 public:
  /// An error for a dataset that does not know its size, as a stream.
  explicit DatasetRows(Dataset dataset) : dataset_(std::move(dataset)), copies_(std::make_unique<Copies>()) {
    const auto size = dataset_.size();
    TORCH_CHECK_VALUE(size.has_value(), "DatasetRows: the dataset does not know its size; write a BatchSource for a stream");
    size_ = static_cast<int64_t>(*size);
  }

  int64_t size() const { return size_; }

  auto get(const std::vector<size_t>& rows) const {
    auto copy = take();
    auto batch = copy->get_batch(rows);
    const std::lock_guard lock(copies_->mutex);
    copies_->idle.push_back(std::move(copy));
    return batch;
  }

 private:
  struct Copies {
    std::mutex mutex;
    std::vector<std::unique_ptr<Dataset>> idle;
  };

  std::unique_ptr<Dataset> take() const {
    const std::lock_guard lock(copies_->mutex);
    if (copies_->idle.empty()) return std::make_unique<Dataset>(dataset_);
    auto copy = std::move(copies_->idle.back());
    copies_->idle.pop_back();
    return copy;
  }

  Dataset dataset_;
  int64_t size_ = 0;
  std::unique_ptr<Copies> copies_;
};

} // namespace tessera
