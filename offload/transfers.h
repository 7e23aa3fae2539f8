#pragma once

// Internal: asynchronous reads and writes of files.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::internal {

enum class Direction { kRead, kWrite };

/// Bytes to read from, or to write to, a place of an open file.
struct TransferPiece {
  int fd;
  Direction direction;
  char* memory;
  int64_t offset; ///< in the file
  int64_t bytes;
};

/// What has become of the pieces that were started together.
struct TransferState {
  int64_t left = 0; ///< pieces on their way
  int error = 0;    ///< of the first piece that failed
};

/// Moves bytes while the program computes: by io_uring, or by threads where the kernel or the build has none. Thread-safe.
class Transfers {
 public:
  virtual ~Transfers() = default;
  /// Starts to move `pieces`, none of them empty. What they read into or write from is left alone, and `state` alive, until
  /// `wait` has returned.
  virtual void start(std::vector<TransferPiece> pieces, TransferState& state) = 0;
  /// Returns when all of them are done.
  virtual void wait(TransferState& state) = 0;
};

/// How io_uring or threads are given the pieces: of at most so many bytes.
inline constexpr int64_t kTransferBytes = int64_t{1} << 20;
std::vector<TransferPiece> cut(const std::vector<TransferPiece>& pieces);

/// Null where the kernel refuses io_uring, or the build has no liburing.
std::shared_ptr<Transfers> make_uring_transfers();
std::shared_ptr<Transfers> make_thread_transfers();

/// Those of this process, made at the first call: by threads where the variable TESSERA_OFFLOAD_IO is "threads".
Transfers& process_transfers();

} // namespace tessera::internal
