#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/data/data_source.h>

namespace tessera {

struct PrefetchOptions {
  int64_t depth = 2;   ///< batches that are read ahead; as many as there are workers, where these are more
  int64_t workers = 1; ///< threads; more than one for a RowSource alone, whose `get` several of them then call at once
};

namespace internal {

/// Threads that fill slots ahead of the one that takes them.
class ReadAhead;
/// Ends them, or forgets them in a child of `fork`, which has none of its parent's threads.
struct EndReadAhead {
  int fork_depth = 0; ///< where they were started
  void operator()(ReadAhead* ahead) const noexcept;
};
using ReadAheadThreads = std::unique_ptr<ReadAhead, EndReadAhead>;

/// Draws the work that fills a slot: one call after the other, while the works of several slots are done at once. What it throws,
/// and what the work throws, is the slot's error, after which nothing more is drawn.
using DrawWork = std::function<std::function<void()>(size_t slot)>;

/// The workers fill slots 0 … slots - 1 in turn, again and again, each when it was released.
ReadAheadThreads start_read_ahead(int64_t slots, int64_t workers, DrawWork draw);
/// Waits for the next slot in turn; throws its error.
size_t wait_for_slot(ReadAhead& ahead);
/// Frees the slot that was waited for last.
void release_slot(ReadAhead& ahead);

/// A source that says what is next, in order, apart from reading it, which may happen on any thread (RowSource).
template <typename Source>
concept DrawnApart = requires(Source source, const Source& constant) {
  constant.read(*source.draw());
};

} // namespace internal

/// A source whose batches are read ahead, in their order; see `prefetch`.
template <BatchSource Source>
class Prefetched {
 public:
  using Batch = std::remove_cvref_t<decltype(*std::declval<Source&>().next())>;

  Prefetched(Source source, const PrefetchOptions& options)
      : kept_(std::make_unique<Kept>(std::move(source))), options_(options) {
    TORCH_CHECK_VALUE(options.depth > 0, "prefetch: a depth of ", options.depth, " batches");
    TORCH_CHECK_VALUE(options.workers > 0, "prefetch: ", options.workers, " workers");
    TORCH_CHECK_VALUE(options.workers == 1 || internal::DrawnApart<Source>, "prefetch: ", options.workers,
                      " workers for a source that gives one batch after the other: only a RowSource can have several");
    kept_->slots.resize(static_cast<size_t>(std::max(options.depth, options.workers)));
    kept_->position = kept_->source.position();
  }

  std::optional<Batch> next() {
    auto& kept = *kept_;
    if (!kept.ahead) kept.ahead = internal::start_read_ahead(std::ssize(kept.slots), options_.workers, drawing());
    size_t taken = 0;
    try {
      taken = internal::wait_for_slot(*kept.ahead);
    } catch (...) {
      kept.ahead.reset();
      if constexpr (internal::DrawnApart<Source>) kept.source.seek(kept.position);
      throw;
    }
    auto& slot = kept.slots[taken];
    auto batch = std::exchange(slot.batch, std::nullopt);
    kept.position = slot.after;
    internal::release_slot(*kept.ahead);
    return batch;
  }

  DataPosition position() const { return kept_->position; }

  void seek(const DataPosition& position) {
    kept_->ahead.reset();
    kept_->source.seek(position);
    kept_->position = position;
  }

  /// The source, for what does not change it.
  const Source& source() const { return kept_->source; }

 private:
  struct Slot {
    std::optional<Batch> batch;
    DataPosition after;
  };
  /// What the threads use lies still where this object is moved.
  struct Kept {
    explicit Kept(Source held) : source(std::move(held)) {}
    Source source;
    std::vector<Slot> slots;
    DataPosition position;                         ///< after what was given
    internal::ReadAheadThreads ahead{nullptr, {}}; ///< goes before what it uses
  };

  internal::DrawWork drawing() {
    return [&kept = *kept_](size_t number) -> std::function<void()> {
      auto& slot = kept.slots[number];
      if constexpr (internal::DrawnApart<Source>) {
        auto rows = kept.source.draw();
        slot.after = kept.source.position();
        return [&kept, &slot, rows = std::move(rows)] {
          slot.batch = rows ? std::optional<Batch>(kept.source.read(*rows)) : std::nullopt;
        };
      } else {
        slot.batch = kept.source.next();
        slot.after = kept.source.position();
        return [] {};
      }
    };
  }

  std::unique_ptr<Kept> kept_;
  PrefetchOptions options_;
};

/// Reads the batches of `source` ahead on threads of its own: a BatchSource with the same batches in the same order.
///
/// The threads start with the first `next`, and read into the next epoch too. `position` counts what was given. `seek` drops what
/// was read ahead. What the source throws is thrown by the `next` whose batch it would have been; the call after that asks the
/// source again, a RowSource for the same batch. `seek` and the destructor wait for the batches that are being read, not for
/// those that would follow. One thread may use it at a time.
template <BatchSource Source>
Prefetched<Source> prefetch(Source source, const PrefetchOptions& options = {}) {
  return {std::move(source), options};
}

} // namespace tessera
