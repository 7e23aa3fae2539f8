#include <tessera/tests/support/simulated_device/stream.h>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <chrono>
#include <thread>
#include <utility>

namespace tessera::testing::sim {

namespace {

// A sleep of 10 us takes 45 on a virtual machine, 28 of them on a core.
void wait_us(int delay_us) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(delay_us);
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

} // namespace

void Stream::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  draws_.seed(delays.seed * 1000003 + id_ * 7919);
  is_slow_ = draws_() % 2 == 0;
}

uint64_t Stream::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  // It never ends, as the stream does not: the process leaves it where it is.
  if (!std::exchange(has_thread_, true)) std::thread([this] { run(); }).detach();
  items_.push_back(std::move(work));
  wake_.notify_one();
  return ++pushed_;
}

uint64_t Stream::pushed() const {
  const std::lock_guard lock(mutex_);
  return pushed_;
}

bool Stream::has_done(uint64_t count) const {
  const std::lock_guard lock(mutex_);
  return done_ >= count;
}

void Stream::wait_for(uint64_t count) const {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return done_ >= count; });
}

std::function<void()> Stream::take(int& delay_us) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return !items_.empty(); });
  auto work = std::move(items_.front());
  items_.pop_front();
  if (delays_.max_us > 0) {
    delay_us = static_cast<int>(draws_() % (static_cast<uint64_t>(delays_.max_us) + 1));
    if (is_slow_) delay_us *= delays_.slow_factor;
  }
  return work;
}

void Stream::run() {
  at::init_num_threads();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::DisableRecordFunctionGuard unseen; // what runs here is the device's
  for (;;) {
    int delay_us = 0;
    auto work = take(delay_us);
    wait_us(delay_us);
    work();
    work = nullptr; // what it holds is gone when it counts as done
    const std::lock_guard lock(mutex_);
    ++done_;
    progress_.notify_all();
  }
}

} // namespace tessera::testing::sim
