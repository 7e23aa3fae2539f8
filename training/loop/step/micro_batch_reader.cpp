#include <tessera/training/loop/step/micro_batch_reader.h>

#include <c10/util/Exception.h>

namespace tessera::internal {

bool MicroBatchReader::read_one() {
  if (!work_->read()) return false;
  behind_.push_back(work_->position());
  return true;
}

void MicroBatchReader::fill() {
  TORCH_CHECK_VALUE(work_->has_source(), "there is none: call data() before step() or run()");
  if (work_->size() == 0) {
    has_ended_ = false;
    const bool is_there = read_one() || read_one(); // where a resume goes on behind the last row of an epoch
    TORCH_CHECK_VALUE(is_there, "it has no micro-batch in a whole epoch");
  }
  while (!has_ended_ && work_->size() <= wanted_) has_ended_ = !read_one();
  if (has_ended_)
    behind_.back() = work_->position(); // the next epoch's start, also on ranks that would leave out other last rows
}

DataPosition MicroBatchReader::consume() {
  const auto count = static_cast<size_t>(ready());
  const auto position = behind_[count - 1];
  behind_.erase(behind_.begin(), behind_.begin() + static_cast<std::ptrdiff_t>(count));
  work_->drop(count);
  return position;
}

void MicroBatchReader::seek(const DataPosition& position) {
  work_->seek(position);
  behind_.clear();
  has_ended_ = false;
}

} // namespace tessera::internal
