#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <tessera/offload/transfers.h>

namespace tessera::internal {

namespace {

/// 0, or the error.
int move_bytes(TransferPiece piece) {
  while (piece.bytes > 0) {
    const auto size = static_cast<size_t>(piece.bytes);
    const auto moved = piece.direction == Direction::kRead ? ::pread(piece.fd, piece.memory, size, piece.offset)
                                                           : ::pwrite(piece.fd, piece.memory, size, piece.offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EIO; // the file ends
    piece.memory += moved;
    piece.offset += moved;
    piece.bytes -= moved;
  }
  return 0;
}

/// A few threads that each move one piece at a time.
class ThreadTransfers final : public Transfers {
 public:
  ThreadTransfers() {
    constexpr int kThreads = 4;
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { run(); });
  }
  ThreadTransfers(const ThreadTransfers&) = delete;
  ThreadTransfers& operator=(const ThreadTransfers&) = delete;
  ~ThreadTransfers() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    queued_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void start(std::vector<TransferPiece> pieces, TransferState& state) override {
    {
      const std::lock_guard lock(mutex_);
      for (const auto& piece : cut(pieces)) {
        queue_.emplace_back(piece, &state);
        ++state.left;
      }
    }
    queued_.notify_all();
  }

  void wait(TransferState& state) override {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return state.left == 0; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      queued_.wait(lock, [&] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto [piece, state] = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const int error = move_bytes(piece);
      lock.lock();
      if (state->error == 0) state->error = error;
      if (--state->left == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable queued_, done_;
  std::deque<std::pair<TransferPiece, TransferState*>> queue_;
  std::vector<std::thread> threads_;
  bool ends_ = false;
};

} // namespace

std::shared_ptr<Transfers> make_thread_transfers() { return std::make_shared<ThreadTransfers>(); }

} // namespace tessera::internal
