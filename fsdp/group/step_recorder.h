#pragma once

// Internal: what a model's groups do, while somebody wants a report of it.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include <tessera/collectives/counters.h>
#include <tessera/collectives/work.h>
#include <tessera/fsdp/step_report.h>

namespace tessera::internal {

class ParameterGroup;

/// Records what the groups of one model do. Thread-safe.
class StepRecorder {
 public:
  /// Calls `change` of the group's report.
  template <typename Change> // void(GroupReport&)
  void change(const ParameterGroup& group, const Change& change) {
    const std::lock_guard lock(mutex_);
    change(of(group));
  }
  /// So many bytes of gathered parameters are held now.
  void note_unsharded(int64_t bytes);
  /// What was recorded since this was made, or called last.
  StepReport take();

 private:
  using Clock = std::chrono::steady_clock;
  GroupReport& of(const ParameterGroup& group);

  std::mutex mutex_; // of all that follows
  Clock::time_point begin_ = Clock::now();
  int64_t peak_unsharded_bytes_ = 0;
  std::vector<GroupReport> groups_; // by their numbers
};

// Each of these does nothing while nobody wants a report of the group's model.

/// A collective of the group is about to be issued; `full` is the larger of its input and output.
void note_collective(const ParameterGroup& group, CollectiveKind kind, const at::Tensor& full);
void note_collective(const ParameterGroup& group, CollectiveKind kind, int64_t bytes);
/// A collective of the group was issued, and this is its Work.
void note_work(const ParameterGroup& group, const Work& work);
/// A forward or a backward is about to read the group for the first time.
void note_read(const ParameterGroup& group);

/// Adds the time of its scope to what the program waited for the group.
class ExposedTime {
 public:
  ExposedTime(const ParameterGroup& group, double GroupReport::*sum);
  ~ExposedTime();
  ExposedTime(const ExposedTime&) = delete;
  ExposedTime& operator=(const ExposedTime&) = delete;

 private:
  const ParameterGroup* group_ = nullptr; ///< null: nobody wants a report
  double GroupReport::*sum_;
  std::chrono::steady_clock::time_point begin_;
};

} // namespace tessera::internal
