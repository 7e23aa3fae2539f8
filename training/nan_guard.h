#pragma once

#include <torch/nn/module.h>

#include <memory>

namespace tessera {

namespace internal {
class NanSearch;
}

/// What a `NanGuard` looks for.
enum class NanGuardWatch {
  kNan,          ///< only NaN: masks are often made of infinities
  kNanOrInfinity ///< both
};

/// Finds where NaN comes from: the first operator that made it, the module that ran it, and the rank.
///
/// ```cpp
/// tessera::NanGuard guard(*model);
/// for (…) {
///   loss_of(*model, batch).backward();
///   guard.check();
/// }
/// ```
///
/// While it lives, it checks the inputs and results of each operator: those that this thread calls, and those of the backwards
/// that it starts, on autograd's threads too. That costs some small operators for each operator, and on CUDA the host waits for
/// each check. So use it for a run that goes wrong, not for every run. Reductions bring a rank's NaN to the other ranks, so
/// `check` compares on all ranks which operator was the first.
///
/// The module is found by the parameter that an operator reads. For an operator without a parameter, the last module is named.
/// Memory from `empty` may hold NaN that is never used. An operator that reads such memory before it is written counts as one
/// that got NaN. A cast does not: its result is checked when it is read.
///
/// One at a time in a process, and destroyed by the thread that made it. (PyTorch: `detect_anomaly`, which checks only the
/// backward.)
class NanGuard {
 public:
  explicit NanGuard(const torch::nn::Module& model, NanGuardWatch watch = NanGuardWatch::kNan);
  ~NanGuard();
  NanGuard(const NanGuard&) = delete;
  NanGuard& operator=(const NanGuard&) = delete;

  /// Every rank of the job calls it, if there is a job. If a rank has seen NaN since the last check, it throws on all ranks, and
  /// lists what each rank saw first. The rank that had called the fewest operators comes first, since all run the same program.
  /// Each check starts anew.
  void check();

 private:
  std::shared_ptr<internal::NanSearch> search_;
  uint64_t callback_;
};

} // namespace tessera
