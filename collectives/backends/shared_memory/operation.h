#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/backends/shared_memory/lane.h>
#include <tessera/collectives/backends/shared_memory/motion.h>
#include <tessera/collectives/backends/shared_memory/transfer.h>
#include <tessera/collectives/calls/signature.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal::shared_memory {

/// What a collective is about, as the caller says.
struct Request {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string label;
  Signature signature;              ///< without its sequence number
  std::vector<int64_t> counts = {}; ///< of an all_to_all: bytes sent to each member, then those expected from each
  Motion motion = {};
  std::array<at::Tensor, 2> tensors = {}; ///< kept alive until the end
};

/// The members of a lane, by their index on it.
struct Members {
  std::vector<int64_t> ranks;     ///< in the job
  std::vector<int> places;        ///< in the group
  std::vector<char*> arenas = {}; ///< where those lie in this process; empty where not all have one
  std::function<bool(int member)> has_left;
};

/// Members that do not come.
struct Absence {
  std::vector<int64_t> ranks;
  bool timed_out = false;
  std::string awaited; ///< what they were waited for with
};

/// One call in flight on a lane. All but `is_done` is for the engine, which lets one thread at a time touch it.
class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  /// `group`, for errors, outlives it: of group default [0, 1] on rank 1.
  Operation(Request&& request, const std::string& group) : request_(std::move(request)), group_(group) {}

  bool is_done() const { return done_.load(); }

  const Request& request() const { return request_; }
  std::string text() const;
  bool is_published() const { return stage_ != Stage::kMade; }
  /// True when the others need nothing more of this member than what `publish` has shown.
  bool is_short(const Lane& lane) const {
    return request_.motion.largest_input <= lane.shape().inline_bytes && !request_.motion.varies;
  }

  /// False where the slot is still in use.
  bool publish(Lane& lane, uint64_t sequence);
  /// Goes as far as it can without waiting, and returns whether that was to the end. Throws c10::Error where the members have
  /// called different collectives.
  bool advance(Lane& lane, const Members& members);
  /// The members that it waits for, by index; and with what.
  std::vector<int> absent(const Lane& lane) const;
  std::string awaited(const std::vector<int64_t>& absent, bool of_whole_group) const;

  void complete();
  void fail(std::exception_ptr failure, std::optional<Absence> unexplained = std::nullopt);

  std::optional<Clock::time_point> deadline; ///< from the first wait on
  static constexpr int64_t kNoRank = -1;
  std::atomic<int64_t> announced = kNoRank; ///< the others are told that this rank waits for that one
  bool is_shown = false;                    ///< `publish` has shown all that the others need of this member
  bool needs_background = false;            ///< others wait for what this member does after `publish`, or nobody waits here
  std::exception_ptr failure;
  std::optional<Absence> unexplained; ///< the failure, where nobody waited

 private:
  enum class Stage { kMade, kPublished, kMoving };

  void compare_signatures(const Lane& lane, const std::vector<int64_t>& ranks) const;
  void compare_counts(const Lane& lane, const std::vector<int64_t>& ranks) const;

  Request request_;
  const std::string& group_;
  Stage stage_ = Stage::kMade;
  uint64_t sequence_ = 0;
  std::unique_ptr<Transfer> transfer_;
  std::atomic<bool> done_{false};
};

} // namespace tessera::internal::shared_memory
