#pragma once

// Internal: what the ranks agree on before a step.

#include <cstdint>
#include <vector>

#include <tessera/training/loop/step/agreement.h>

namespace tessera::internal {

/// What a rank asks for, or after the agreement any rank.
struct Requests {
  bool stop = false, save = false, evaluate = false, terminated = false, out_of_time = false;
};

/// What a rank has for the next step, or after the agreement all ranks together.
struct StepPlan {
  int64_t micro_batches = 0;  ///< of each rank
  std::vector<double> counts; ///< of this rank's micro-batches
  double count = 0, rows = 0; ///< of all ranks that have different data
  bool counts_rows = false;   ///< the rows are not just what the loss counts
  bool ends_epoch = false;
  Requests requests;
  double seconds = 0; ///< the first rank's
};

/// Makes `plan` that of all ranks: the all-reduce before a step. Throws on every rank where one has noted an error, where their
/// micro-batches are not equally many, where an epoch ends on some alone, where ranks that should have the same data count
/// otherwise, and where nothing counts.
void agree_on_step(StepPlan& plan, Agreement& agreement);
/// Does the same where no step follows, for the requests and the seconds alone.
void agree_on_requests(StepPlan& plan, Agreement& agreement);

} // namespace tessera::internal
