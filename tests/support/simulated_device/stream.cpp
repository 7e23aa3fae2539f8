#include <tessera/tests/support/simulated_device/stream.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::testing::sim {

namespace {

constexpr uint64_t kMostBehind = 1024; // items: what holds memory of the host is then run beside the program

// A sleep of 10 us takes 45 on a virtual machine, 28 of them on a core.
void wait_us(int delay_us) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(delay_us);
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

/// What a thread that runs a stream's items has for its own: none of the program's modes, and nobody watches.
class DeviceScope {
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const at::DisableRecordFunctionGuard unseen_; // what runs here is the device's
};

thread_local bool runs_for_the_device = false;

/// A thread of the host, or of another stream, in the modes of a stream's own thread.
class BorrowedThread {
 public:
  BorrowedThread() : was_(std::exchange(runs_for_the_device, true)) {
    if (!was_) scope_.emplace(modes());
  }
  ~BorrowedThread() { runs_for_the_device = was_; }
  BorrowedThread(const BorrowedThread&) = delete;
  BorrowedThread& operator=(const BorrowedThread&) = delete;

 private:
  /// Those of a new thread, not of the one that asks first.
  static const at::ThreadLocalState& modes() {
    static const auto* const known = [] {
      const at::ThreadLocalState* made = nullptr;
      std::thread([&] {
        const DeviceScope scope;
        made = new at::ThreadLocalState;
      }).join();
      return made;
    }();
    return *known;
  }

  const bool was_;
  std::optional<at::ThreadLocalStateGuard> scope_;
};

} // namespace

void Stream::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  draws_.seed(delays.seed * 1000003 + id_ * 7919);
  is_slow_ = draws_() % 2 == 0;
}

uint64_t Stream::push(std::function<void()> work, Start start) {
  const std::lock_guard lock(mutex_);
  items_.push_back({std::move(work), start});
  const auto count = ++pushed_;
  if (start == Start::kNow || delays_.max_us > 0 || items_.size() > kMostBehind) demand(count);
  return count;
}

void Stream::demand(uint64_t count) {
  if (demanded_ >= count) return;
  demanded_ = count;
  // It never ends, as the stream does not: the process leaves it where it is.
  if (!std::exchange(has_thread_, true)) std::thread([this] { run_own_thread(); }).detach();
  wake_.notify_one();
}

bool Stream::query(uint64_t count) {
  if (has_done(count)) return true;
  const std::lock_guard lock(mutex_);
  demand(count);
  return false;
}

void Stream::wait_for(uint64_t count) {
  if (!has_done(count)) run_until(count, Runner::kAnyThread);
}

void Stream::run_until(uint64_t count, Runner runner) {
  const BorrowedThread modes;
  std::unique_lock lock(mutex_);
  while (done_ < count) {
    const bool may_run = runner == Runner::kOwnThread || (!items_.empty() && items_.front().start == Start::kWhenAwaited);
    if (!is_running_ && may_run) {
      run_next(lock);
      continue;
    }
    if (!is_running_) demand(count);
    ++waiting_;
    progress_.wait(lock);
    --waiting_;
  }
}

void Stream::run_next(std::unique_lock<std::mutex>& lock) {
  is_running_ = true;
  auto item = std::move(items_.front());
  items_.pop_front();
  const int delay_us = draw_delay_us();
  lock.unlock();
  if (delay_us > 0) wait_us(delay_us);
  item.work();
  item.work = nullptr; // what it holds is gone when it counts as done
  lock.lock();
  is_running_ = false;
  ++done_;
  if (waiting_ > 0) progress_.notify_all();
}

int Stream::draw_delay_us() {
  if (delays_.max_us == 0) return 0;
  const auto delay_us = static_cast<int>(draws_() % (static_cast<uint64_t>(delays_.max_us) + 1));
  return is_slow_ ? delay_us * delays_.slow_factor : delay_us;
}

void Stream::run_own_thread() {
  at::init_num_threads();
  runs_for_the_device = true;
  const DeviceScope scope;
  for (;;) {
    uint64_t count = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return demanded_ > done_; });
      count = demanded_;
    }
    run_until(count, Runner::kOwnThread);
  }
}

} // namespace tessera::testing::sim
