#include <tessera/data/order/read_ahead.h>

#include <utility>

#include <tessera/base/background_scheduling.h>
#include <tessera/base/forks.h>

namespace tessera::internal {

ReadAhead::ReadAhead(int64_t slots, int64_t workers, DrawWork draw) : draw_(std::move(draw)), slots_(static_cast<size_t>(slots)) {
  const BackgroundScheduling background;
  try {
    for (int64_t i = 0; i < workers; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) { // no more threads
    stop();
    throw;
  }
}

ReadAhead::~ReadAhead() { stop(); }

void ReadAhead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  freed_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void ReadAhead::run() {
  for (;;) {
    std::unique_lock drawing(drawing_);
    const auto slot = next_to_fill();
    if (!slot) return;
    try {
      const auto work = draw_(*slot);
      drawing.unlock();
      work();
      fill(*slot, nullptr);
    } catch (...) {
      fill(*slot, std::current_exception());
    }
  }
}

/// None once nothing more is to be drawn.
std::optional<size_t> ReadAhead::next_to_fill() {
  std::unique_lock lock(mutex_);
  freed_.wait(lock, [&] { return stopped_ || drawn_ - taken_ < static_cast<int64_t>(slots_.size()); });
  if (stopped_) return std::nullopt;
  return slot_of(drawn_++);
}

void ReadAhead::fill(size_t slot, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (error) stopped_ = true;
  slots_[slot] = {true, std::move(error)};
  filled_.notify_one();
  if (stopped_) freed_.notify_all();
}

size_t ReadAhead::wait() {
  std::unique_lock lock(mutex_);
  auto& slot = slots_[slot_of(taken_)];
  filled_.wait(lock, [&] { return slot.is_filled; });
  slot.is_filled = false;
  if (slot.error) std::rethrow_exception(std::exchange(slot.error, nullptr));
  return slot_of(taken_);
}

void ReadAhead::release() {
  const std::lock_guard lock(mutex_);
  ++taken_;
  freed_.notify_one();
}

void EndReadAhead::operator()(ReadAhead* ahead) const noexcept {
  if (internal::fork_depth() != fork_depth) return leave_to_parent(ahead);
  delete ahead;
}

ReadAheadThreads start_read_ahead(int64_t slots, int64_t workers, DrawWork draw) {
  return {new ReadAhead(slots, workers, std::move(draw)), EndReadAhead{fork_depth()}};
}
size_t wait_for_slot(ReadAhead& ahead) { return ahead.wait(); }
void release_slot(ReadAhead& ahead) { ahead.release(); }

} // namespace tessera::internal
