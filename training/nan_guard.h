#pragma once

#include <torch/nn/module.h>

#include <memory>

namespace tessera {

namespace internal {
class NanSearch;
}

/// What a `NanGuard` looks for.
enum class NanGuardWatch {
  kNan,          ///< NaN alone: masks are often made of infinities
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
/// While it lives, it looks at what each operator reads and returns: those that this thread calls, and those of the backwards
/// that it starts, on autograd's threads too. That costs some small operators for each one, and on CUDA the host waits for all of
/// them: it is for a run that goes wrong, not for each. Reductions bring a rank's NaN to the others, so that `check` asks all of
/// them which operator was the first.
///
/// A module is told from the parameter that an operator reads; an operator that reads none comes after the module that was last.
/// Memory that `empty` returned may hold NaN that nobody uses. An operator that reads a part of it before that is written is
/// taken for one that got NaN. A cast is not: what it returns is looked at where it is read.
///
/// One at a time in a process, and destroyed by the thread that made it. (PyTorch: `detect_anomaly`, which looks at backward
/// alone.)
class NanGuard {
 public:
  explicit NanGuard(const torch::nn::Module& model, NanGuardWatch watch = NanGuardWatch::kNan);
  ~NanGuard();
  NanGuard(const NanGuard&) = delete;
  NanGuard& operator=(const NanGuard&) = delete;

  /// Every rank of the job calls it, where there is one. Throws on all of them where one has seen NaN since the last check, and
  /// says what each has seen first. Of two ranks the one comes first that had called fewer operators: ranks run the same program.
  /// The next check knows nothing of what this one has found.
  void check();

 private:
  std::shared_ptr<internal::NanSearch> search_;
  uint64_t callback_;
};

} // namespace tessera
