#include <tessera/offload/transfers.h>

#ifdef TESSERA_WITH_LIBURING

#include <c10/util/Exception.h>
#include <liburing.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>

#endif

namespace tessera::internal {

#ifdef TESSERA_WITH_LIBURING

namespace {

struct Operation {
  TransferPiece piece;
  TransferState* state;
};

/// One ring. Whoever waits takes what is done, and gives the kernel what waits in the queue.
class UringTransfers final : public Transfers {
 public:
  explicit UringTransfers(const io_uring& ring) : ring_(ring) {}
  UringTransfers(const UringTransfers&) = delete;
  UringTransfers& operator=(const UringTransfers&) = delete;
  ~UringTransfers() override { io_uring_queue_exit(&ring_); }

  static constexpr unsigned kDepth = 64;

  void start(std::vector<TransferPiece> pieces, TransferState& state) override {
    const std::lock_guard lock(mutex_);
    for (const auto& piece : cut(pieces)) {
      queue_.push_back(new Operation{piece, &state});
      ++state.left;
    }
    submit(/*waits=*/false);
  }

  void wait(TransferState& state) override {
    const std::lock_guard lock(mutex_);
    while (state.left > 0) {
      submit(/*waits=*/true);
      take_finished();
    }
  }

 private:
  void submit(bool waits) {
    for (; in_flight_ < kDepth && !queue_.empty(); queue_.pop_front(), ++in_flight_) {
      io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
      if (!entry) break;
      const auto& piece = queue_.front()->piece;
      const auto bytes = static_cast<unsigned>(piece.bytes);
      const auto offset = static_cast<uint64_t>(piece.offset);
      if (piece.direction == Direction::kRead) {
        io_uring_prep_read(entry, piece.fd, piece.memory, bytes, offset);
      } else {
        io_uring_prep_write(entry, piece.fd, piece.memory, bytes, offset);
      }
      io_uring_sqe_set_data(entry, queue_.front());
    }
    const int result = waits ? io_uring_submit_and_wait(&ring_, 1) : io_uring_submit(&ring_);
    const bool passes = result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY; // the next call tries again
    TORCH_CHECK(passes, "offload: io_uring failed: ", std::strerror(-result));
  }

  void take_finished() {
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) == 0 && entry) {
      auto* const operation = static_cast<Operation*>(io_uring_cqe_get_data(entry));
      const int result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      --in_flight_;
      finish(operation, result);
    }
  }

  void finish(Operation* operation, int moved) {
    auto& [piece, state] = *operation;
    if (moved == -EINTR || moved == -EAGAIN)
      moved = 0;
    else if (moved == 0)
      moved = -EIO; // the file ends
    if (moved >= 0 && moved < piece.bytes) {
      piece.memory += moved;
      piece.offset += moved;
      piece.bytes -= moved;
      queue_.push_front(operation);
      return;
    }
    if (moved < 0 && state->error == 0) state->error = -moved;
    --state->left;
    delete operation;
  }

  std::mutex mutex_;
  io_uring ring_;
  std::deque<Operation*> queue_;
  unsigned in_flight_ = 0;
};

} // namespace

std::shared_ptr<Transfers> make_uring_transfers() {
  io_uring ring{};
  if (io_uring_queue_init(UringTransfers::kDepth, &ring, 0) != 0) return nullptr;
  return std::make_shared<UringTransfers>(ring);
}

#else

std::shared_ptr<Transfers> make_uring_transfers() { return nullptr; }

#endif

} // namespace tessera::internal
