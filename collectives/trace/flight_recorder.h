#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/base/forks.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/trace/tick_clock.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

/// A call of this rank on a communicator, or the making of one.
struct RecordedCall {
  enum class State : uint8_t {
    kIssued,  ///< nobody has waited for it yet
    kAwaited, ///< a thread waits for it
    kDone,    ///< seen complete
    kFailed,  ///< its wait threw `failure`
    kRefused  ///< the call itself threw `failure`: it was not issued, and has no sequence number
  };

  uint64_t number = 0;     ///< of this process, from 0
  int group = 0;           ///< index in `FlightRecorder::groups`
  bool is_connect = false; ///< the making of the group: `kind` says nothing
  CollectiveKind kind = CollectiveKind::kBarrier;
  /// Counts from 0 how many collectives of the group came before, or messages from and to the same ranks. -1: none of them.
  int64_t sequence = -1;
  ReduceOp op = ReduceOp::kSum; ///< of what reduces
  int peer = -1;                ///< the root, the receiver or the sender, as an index of the group's ranks
  at::ScalarType dtype = at::kByte;
  int64_t bytes = 0; ///< of the full buffer
  int64_t thread = 0;
  State state = State::kIssued;
  Ticks issued = 0, awaited = 0, ended = 0; ///< 0: not yet
  std::string label, failure;
};

/// "issued", "awaited", …
const char* to_string(RecordedCall::State state);

/// What the collectives of one communicator have in common.
struct RecordedGroup {
  std::string name, device;
  std::vector<int64_t> ranks;                           ///< global, in group order
  int rank = 0;                                         ///< this process's index in `ranks`
  int64_t issued = 0;                                   ///< collectives so far, with those that the ring has lost
  std::map<std::pair<int, int>, int64_t> messages = {}; ///< the same, from one rank of the group to another
};

/// The last calls of this rank, in a ring: each new one takes the place of the oldest. From any thread. In a forked child of the
/// process that made it nothing is recorded.
class FlightRecorder {
 public:
  explicit FlightRecorder(size_t capacity);

  /// The index of the group: the same again where its making has failed, and is tried once more.
  int add_group(RecordedGroup group);
  /// What the caller knows of a call.
  struct Call {
    int group;
    CollectiveKind kind;
    std::string_view label;
    at::ScalarType dtype = at::kByte;
    int64_t bytes = 0;
    ReduceOp op = ReduceOp::kSum;
    int peer = -1;
  };
  /// Each of these is given the number that `issue` or `connect` returned, and does nothing where the ring has lost that call.
  uint64_t issue(const Call& call);
  uint64_t connect(int group);
  void await(uint64_t number);
  void end(uint64_t number);
  void fail(uint64_t number, std::string failure);
  void refuse(uint64_t number, std::string failure);

  size_t capacity() const { return ring_.size(); }
  struct Snapshot {
    std::vector<RecordedGroup> groups;
    std::vector<RecordedCall> calls; ///< the oldest first
    uint64_t issued = 0;             ///< calls so far
    Moment begin = {}, end = {};     ///< when the recorder was made, and now
  };
  Snapshot snapshot() const;

 private:
  RecordedCall& next(int group);
  RecordedCall* find(uint64_t number);
  void close(uint64_t number, RecordedCall::State state, std::string failure);

  const int fork_depth_ = fork_depth();
  const Moment begin_ = Moment::now();
  mutable std::mutex mutex_; // guards what follows
  std::vector<RecordedGroup> groups_;
  std::vector<RecordedCall> ring_;
  uint64_t issued_ = 0;
};

} // namespace tessera::internal
