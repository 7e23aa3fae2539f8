#pragma once

namespace tessera::internal {

/// While it lives, threads that the calling thread starts do not preempt others when they wake (SCHED_BATCH, which needs no
/// privilege); they get the same share of the processors. Does nothing where the caller has another policy than the default one.
///
/// gloo's thread spins while the program's thread holds the lock of a connection. Where it has preempted that thread, on a
/// machine whose cores all compute, the spinning lasts a time slice.
class BackgroundScheduling {
 public:
  BackgroundScheduling() noexcept;
  ~BackgroundScheduling();
  BackgroundScheduling(const BackgroundScheduling&) = delete;
  BackgroundScheduling& operator=(const BackgroundScheduling&) = delete;

 private:
  bool changed_ = false;
};

} // namespace tessera::internal
