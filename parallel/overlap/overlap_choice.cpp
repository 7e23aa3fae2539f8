#include <tessera/parallel/overlap/overlap_choice.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <absl/container/flat_hash_map.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include <tessera/base/current_stream.h>
#include <tessera/collectives/process_context.h>
#include <tessera/parallel/overlap.h>

namespace tessera::internal::parallel {

namespace {

/// What was measured on each rank of this process, of which there are several where threads are ranks.
class Decisions {
 public:
  static Decisions& instance() {
    static auto* const all = new Decisions;
    return *all;
  }
  std::optional<bool> find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(std::pair(process_context().rank(), key));
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }
  void add(const std::string& key, OverlapDecision decision) {
    const std::lock_guard lock(mutex_);
    const auto rank = process_context().rank();
    known_.emplace(std::pair(rank, key), decision.overlaps);
    log_[rank].push_back(std::move(decision));
  }
  std::vector<OverlapDecision> log() {
    const std::lock_guard lock(mutex_);
    return log_[process_context().rank()];
  }

 private:
  std::mutex mutex_;
  absl::flat_hash_map<std::pair<int, std::string>, bool> known_;
  absl::flat_hash_map<int, std::vector<OverlapDecision>> log_;
};

double seconds_of(const std::function<void()>& run, const DeviceMesh& mesh) {
  const auto stream = current_stream_if_any(mesh.device());
  if (stream) stream->synchronize();
  const auto begin = std::chrono::steady_clock::now();
  run();
  if (stream) stream->synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

} // namespace

bool overlap_is_faster(const std::string& size, const std::string& layer, const DeviceMesh& mesh, const TwoWays& ways) {
  const auto key = size + " on " + mesh.to_string();
  if (const auto known = Decisions::instance().find(key)) return *known;
  constexpr int kRounds = 3, kBefore = 1; // the first of each has its communicator and its memory to make
  double apart = std::numeric_limits<double>::infinity(), overlapped = apart;
  for (int round = -kBefore; round < kRounds; ++round) {
    const auto first = seconds_of(ways.apart, mesh), second = seconds_of(ways.overlapped, mesh);
    if (round < 0) continue;
    apart = std::min(apart, first);
    overlapped = std::min(overlapped, second);
  }
  const at::NoGradGuard no_grad;
  const auto slowest = at::tensor({apart, overlapped}, at::kDouble).to(mesh.device());
  mesh.communicator()->all_reduce(slowest, ReduceOp::kMax, "how long " + key + " takes").wait();
  apart = slowest[0].item<double>();
  overlapped = slowest[1].item<double>();
  const bool overlaps = overlapped < apart;
  Decisions::instance().add(key, {fmt::format("{}: {}", layer, key), apart, overlapped, overlaps});
  return overlaps;
}

} // namespace tessera::internal::parallel

namespace tessera {

std::string to_string(Overlap overlap) {
  switch (overlap) {
    case Overlap::kNever: return "never";
    case Overlap::kAlways: return "always";
    case Overlap::kMeasured: return "measured";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown overlap");
}

Overlap overlap_of(const std::string& name) {
  for (const auto overlap : {Overlap::kNever, Overlap::kAlways, Overlap::kMeasured}) {
    if (name == to_string(overlap)) return overlap;
  }
  TORCH_CHECK_VALUE(false, "overlap is \"", name, "\", but must be never, always or measured");
}

std::string OverlapDecision::to_string() const {
  constexpr double kMilli = 1e3;
  return fmt::format("{}: {:.3f} ms apart, {:.3f} ms overlapped: {}", layer, apart_seconds * kMilli, overlapped_seconds * kMilli,
                     overlaps ? "overlaps" : "stays apart");
}

std::vector<OverlapDecision> overlap_decisions() { return internal::parallel::Decisions::instance().log(); }

} // namespace tessera
