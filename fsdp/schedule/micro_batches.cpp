#include <tessera/fsdp/schedule/micro_batches.h>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <utility>

namespace tessera::internal {

namespace {

const char* name_of(MicroBatchPhase phase) {
  switch (phase) {
    case MicroBatchPhase::kForward: return "forward";
    case MicroBatchPhase::kBackward: return "backward";
    case MicroBatchPhase::kInputGradients: return "input gradients";
    case MicroBatchPhase::kWeightGradients: return "weight gradients";
  }
  return "unknown phase";
}

} // namespace

std::string to_string(const MicroBatch& micro_batch) {
  return fmt::format("the {} of micro-batch {}", name_of(micro_batch.phase), micro_batch.index);
}

std::string MicroBatches::list_in_flight(int64_t but) const {
  std::string list;
  for (const auto& [index, has_input_gradients] : in_flight_) {
    if (index != but) list += fmt::format("{}{}", list.empty() ? "" : ", ", index);
  }
  return list.empty() ? "none" : list;
}

std::string MicroBatches::refusal(const MicroBatch& next, bool trains) const {
  using enum MicroBatchPhase;
  if (running_) return fmt::format("begins inside the scope of {}: end that one first", to_string(*running_));
  if (next.index < 0) return "has a negative index: they are counted from 0";
  if (next.phase == kForward) {
    if (!trains) return "";
    if (in_flight_.contains(next.index))
      return "comes again before its backward: end the step with a phase that is the last, or give it up with zero_grad of the "
             "handle";
    return next.is_last ? "cannot be the last of a step, because its backward follows" : "";
  }
  const auto found = in_flight_.find(next.index);
  if (found == in_flight_.end()) return fmt::format("has no forward before it; in flight: {}", list_in_flight(next.index));
  const bool has_input_gradients = found->second;
  if (next.phase == kWeightGradients && !has_input_gradients) return "comes before its input gradients";
  if (next.phase != kWeightGradients && has_input_gradients)
    return "comes after its input gradients: its weight gradients are left";
  if (!next.is_last) return "";
  if (next.phase == kInputGradients) return "cannot be the last of a step, because its weight gradients follow";
  if (in_flight_.size() == 1) return "";
  return fmt::format("cannot be the last of the step while others are in flight: {}", list_in_flight(next.index));
}

void MicroBatches::begin(const MicroBatch& next, bool trains) {
  running_ = next;
  trains_ = trains;
  has_run_backward_ = false;
}

void MicroBatches::end(bool has_failed) {
  using enum MicroBatchPhase;
  const auto ended = std::exchange(running_, std::nullopt);
  if (!ended) return;
  if (ended->phase == kForward) {
    if (trains_ && !has_failed) in_flight_.emplace(ended->index, false);
    return;
  }
  if (has_failed) return in_flight_.clear();
  const auto found = in_flight_.find(ended->index);
  if (found == in_flight_.end()) return; // given up
  if (ended->phase == kInputGradients) {
    found->second = true;
  } else {
    in_flight_.erase(found);
  }
}

} // namespace tessera::internal
