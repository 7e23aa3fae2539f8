#include <tessera/offload/borrowed_regions.h>

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include <tessera/base/aligned_memory.h>

namespace tessera::internal {

BorrowedRegions::~BorrowedRegions() { detach(); }

char* BorrowedRegions::place(size_t index) const { return static_cast<char*>(buffer_.mutable_data()) + offsets_[index]; }

void BorrowedRegions::load(std::vector<StoragePtr> storages) {
  TORCH_INTERNAL_ASSERT(moving_.empty() && regions_.empty());
  storages_ = std::move(storages);
  offsets_.clear();
  int64_t bytes = 0;
  for (const auto& storage : storages_) {
    offsets_.push_back(bytes);
    bytes += file_region(*storage)->bytes;
  }
  if (!buffer_ || static_cast<int64_t>(buffer_.nbytes()) < bytes) {
    buffer_ = c10::Storage(); // before there is another
    buffer_ = aligned_memory(bytes);
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    const auto& region = *file_region(*storages_[i]);
    moving_.push_back(FileMemory::start(region, Direction::kRead, place(i), region.bytes));
  }
}

void BorrowedRegions::attach() {
  finish();
  for (size_t i = 0; i < storages_.size(); ++i) {
    regions_.push_back(storages_[i]->set_data_ptr(c10::DataPtr(place(i), c10::kCPU)));
  }
}

void BorrowedRegions::detach() {
  for (size_t i = 0; i < regions_.size(); ++i) storages_[i]->set_data_ptr_noswap(std::move(regions_[i]));
  regions_.clear();
}

void BorrowedRegions::store(const std::vector<bool>& is_written) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    const auto& region = *file_region(*storages_[i]);
    if (is_written[i]) moving_.push_back(FileMemory::start(region, Direction::kWrite, place(i), region.bytes));
  }
}

void BorrowedRegions::finish() {
  std::exception_ptr first;
  for (const auto& each : std::exchange(moving_, {})) {
    try {
      each->wait();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

} // namespace tessera::internal
