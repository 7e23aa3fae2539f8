#pragma once

// Internal: streams of a device on which a model's communication runs beside its operators.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <utility>
#include <vector>

#include <tessera/base/current_stream.h>
#include <tessera/collectives/calls/stream_mark.h>
#include <tessera/collectives/work.h>

namespace tessera::internal {

/// While it lives, `stream` is the calling thread's current one, after what that holds; then the one before comes after it.
/// Nothing without a stream, or where it is the current one.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream);
  ~StreamScope();
  bool has_switched() const { return before_.has_value(); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  std::optional<c10::Stream> before_;
  c10::OptionalStreamGuard guard_;
};

/// The current stream uses the memory of `tensor`, which is another stream's: it is handed out again when both have done with it.
void use_on_current_stream(const at::Tensor& tensor);

/// A stream of high priority beside the current one. On the CPU there is none: collectives there have threads of their own.
class SideStream {
 public:
  explicit SideStream(c10::Device device);
  bool exists() const { return stream_.has_value(); }
  /// Blocks the calling thread until all that the stream holds is done.
  void synchronize() const;

  /// Calls `issue` (Work()) with this stream as the current one, after what the current stream holds so far. The Work that it
  /// returns is of all that `issue` started. Without a stream: what `issue` returns. Where that would block the host, it is
  /// waited for no earlier than the Work that this returns.
  template <typename Issue>
  Work run(const Issue& issue) const {
    if (!stream_) return issue();
    follow_current();
    try {
      const c10::StreamGuard guard(*stream_);
      auto work = issue();
      if (work.blocks_host()) return later(std::move(work));
      work.wait();
    } catch (...) { // what it has started may use memory that is freed now
      mark(*stream_).wait();
      throw;
    }
    return mark(*stream_);
  }

 private:
  void follow_current() const;
  Work later(Work work) const;

  std::optional<c10::Stream> stream_;
};

/// The streams of one model's communication. Each kind has its own, so that a gather overlaps with a reduction, and the reduction
/// of one group with the all-reduce of the one before.
struct CommunicationStreams {
  explicit CommunicationStreams(c10::Device device) : gather(device), reduce(device), all_reduce(device) {}
  SideStream gather, reduce, all_reduce;
};

/// Which streams use a block of memory, and that it goes back to the allocator only after all of them.
///
/// A caching allocator gives a freed block to the next request of the stream that it was allocated on, the block's home, without
/// waiting for any other. So its home waits for the others before the block is freed. On the CPU nothing happens.
class BlockUsers {
 public:
  /// A block is allocated on the current stream.
  void begin(c10::Device device);
  /// Whoever uses the block from here on waits for this.
  void wait_for(Work last);
  /// The same for all that the block's home holds so far.
  void wait_for_home();
  /// The current stream uses the block from here on.
  void join();
  /// Nobody uses the block from here on: its home waits for the others. Returns the home, for what is made of the block at last.
  std::optional<c10::Stream> end();

 private:
  std::optional<c10::Stream> home_;
  Work last_;
  std::vector<c10::Stream> users_, waited_; ///< those that have waited for `last_`
};

} // namespace tessera::internal
