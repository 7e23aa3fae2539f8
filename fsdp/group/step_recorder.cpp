#include <tessera/fsdp/group/step_recorder.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

namespace {

Traffic& traffic_of(GroupReport& report, CollectiveKind kind) {
  if (kind == CollectiveKind::kAllGather) return report.all_gathers;
  return kind == CollectiveKind::kReduceScatter ? report.reduce_scatters : report.all_reduces;
}

} // namespace

GroupReport& StepRecorder::of(const ParameterGroup& group) {
  if (groups_.size() <= group.number) groups_.resize(group.number + 1);
  auto& report = groups_[group.number];
  if (report.name.empty()) {
    report.name = group.label();
    report.unsharded_bytes = group.gathered_bytes();
  }
  return report;
}

void StepRecorder::note_unsharded(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  peak_unsharded_bytes_ = std::max(peak_unsharded_bytes_, bytes);
}

StepReport StepRecorder::take() {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  StepReport report{.rank = process_context().rank(),
                    .seconds = std::chrono::duration<double>(now - std::exchange(begin_, now)).count(),
                    .peak_unsharded_bytes = std::exchange(peak_unsharded_bytes_, 0),
                    .groups = std::exchange(groups_, {})};
  std::erase_if(report.groups, [](const GroupReport& group) { return group.name.empty(); });
  return report;
}

void note_collective(const ParameterGroup& group, CollectiveKind kind, const at::Tensor& full) {
  note_collective(group, kind, static_cast<int64_t>(full.nbytes()));
}

void note_collective(const ParameterGroup& group, CollectiveKind kind, int64_t bytes) {
  auto* recorder = group.recorder();
  if (!recorder) return;
  recorder->change(group, [&](GroupReport& report) {
    auto& traffic = traffic_of(report, kind);
    ++traffic.calls;
    traffic.bytes += bytes;
  });
}

void note_work(const ParameterGroup& group, const Work& work) {
  auto* recorder = group.recorder();
  if (!recorder || !group.streams().gather.exists() || work.blocks_host()) return;
  recorder->change(group, [](GroupReport& report) { report.waits_on_streams = true; });
}

void note_read(const ParameterGroup& group) {
  auto* recorder = group.recorder();
  if (!recorder || !group.needs_gather() || group.is_unsharded()) return;
  recorder->change(group, [&](GroupReport& report) { ++(group.is_open() ? report.prefetch_hits : report.prefetch_misses); });
}

ExposedTime::ExposedTime(const ParameterGroup& group, double GroupReport::*sum) : sum_(sum) {
  if (!group.recorder()) return;
  group_ = &group;
  begin_ = std::chrono::steady_clock::now();
}

ExposedTime::~ExposedTime() {
  auto* recorder = group_ ? group_->recorder() : nullptr;
  if (!recorder) return;
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin_;
  recorder->change(*group_, [&](GroupReport& report) { report.*sum_ += waited.count(); });
}

} // namespace tessera::internal
