#include <tessera/training/loop/step/step_plan.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cmath>
#include <string>

#include <tessera/base/listing.h>

namespace tessera::internal {

namespace {

enum PlanSum : size_t { // a place in what is added up
  kCount,
  kFirstCount, // of the first ranks with the same data
  kFirstRows,
  kMicroBatches,
  kSquares, // of the micro-batches
  kEnds,
  kStop,
  kSave,
  kEvaluate,
  kTerminated,
  kOutOfTime,
  kFailures,
  kSeconds,
  kSums
};

using Sums = std::vector<double>;

Sums sums_of(const StepPlan& plan, const Agreement& agreement) {
  const auto micro_batches = static_cast<double>(plan.micro_batches);
  const double is_first_copy = agreement.is_first_copy() ? 1 : 0;
  Sums sums(kSums);
  sums[kCount] = plan.count;
  sums[kFirstCount] = is_first_copy * plan.count;
  sums[kFirstRows] = is_first_copy * plan.rows;
  sums[kMicroBatches] = micro_batches;
  sums[kSquares] = micro_batches * micro_batches;
  sums[kEnds] = plan.ends_epoch ? 1 : 0;
  sums[kStop] = plan.requests.stop ? 1 : 0;
  sums[kSave] = plan.requests.save ? 1 : 0;
  sums[kEvaluate] = plan.requests.evaluate ? 1 : 0;
  sums[kTerminated] = plan.requests.terminated ? 1 : 0;
  sums[kOutOfTime] = plan.requests.out_of_time ? 1 : 0;
  sums[kFailures] = agreement.has_failed() ? 1 : 0;
  sums[kSeconds] = agreement.is_first() ? plan.seconds : 0;
  return sums;
}

Sums reduced(const StepPlan& plan, Agreement& agreement) {
  auto sums = sums_of(plan, agreement);
  Sums none;
  agreement.reduce(sums, none, "the agreement before a step");
  if (sums[kFailures] > 0) agreement.throw_failures();
  return sums;
}

void take_requests(StepPlan& plan, const Sums& sums) {
  plan.requests = {.stop = sums[kStop] > 0,
                   .save = sums[kSave] > 0,
                   .evaluate = sums[kEvaluate] > 0,
                   .terminated = sums[kTerminated] > 0,
                   .out_of_time = sums[kOutOfTime] > 0};
  plan.seconds = sums[kSeconds];
}

/// All ranks call it, since all have the same sums.
void check_alike(const StepPlan& plan, const Sums& sums, const Agreement& agreement) {
  const auto ranks = static_cast<double>(agreement.size()), copies = static_cast<double>(agreement.copies());
  const bool same_number = sums[kMicroBatches] * sums[kMicroBatches] == ranks * sums[kSquares];
  const bool same_end = sums[kEnds] == 0 || sums[kEnds] == ranks;
  const double of_copies = copies * sums[kFirstCount];
  const bool same_count = std::abs(of_copies - sums[kCount]) <= 1e-9 * std::abs(of_copies);
  if (same_number && same_end && same_count) return;
  const auto mine = fmt::format("{} micro-batch{}{}, which count {}", plan.micro_batches, plan.micro_batches == 1 ? "" : "es",
                                plan.ends_epoch ? " and then the end of the epoch" : "", plan.count);
  auto lines = agreement.texts(mine);
  for (size_t i = 0; i < lines.size(); ++i) lines[i] = fmt::format("rank {}: {}", agreement.mesh().ranks()[i], lines[i]);
  TORCH_CHECK(same_number && same_end, "Trainer: a data source has ended on some ranks alone:", listing(lines));
  TORCH_CHECK(false, "Trainer: ranks that should have the same data, which are those outside the data mesh ",
              agreement.data_mesh().to_string(), ", have other data:", listing(lines));
}

} // namespace

void agree_on_step(StepPlan& plan, Agreement& agreement) {
  const auto sums = reduced(plan, agreement);
  check_alike(plan, sums, agreement);
  TORCH_CHECK_VALUE(sums[kFirstCount] > 0, "Trainer: none of the ", plan.micro_batches, " micro-batches of any of the ",
                    agreement.data_ranks(), " data ranks counts anything, so the loss has no mean");
  plan.count = sums[kFirstCount];
  plan.rows = sums[kFirstRows];
  take_requests(plan, sums);
}

void agree_on_requests(StepPlan& plan, Agreement& agreement) { take_requests(plan, reduced(plan, agreement)); }

} // namespace tessera::internal
