#pragma once

// Internal: whether autograd notes, with each view that this thread makes, how to make it again. Without it an in-place op on a
// view of a DTensor comes back as `as_strided` on the global geometry, which no rule can serve. Autograd asks after the operator
// has run, so making a DTensor turns it on and cannot turn it off; views of plain tensors pay for it until someone does.

#include <c10/core/AutogradState.h>

#include <utility>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// Whether it is on for DTensors, and not because the program wants it.
inline constinit PerThread<bool> replays_for_dtensors;

inline void start_view_replay() {
  auto& state = c10::AutogradState::get_tls_state();
  if (state.get_view_replay_enabled()) return;
  state.set_view_replay_enabled(true);
  *replays_for_dtensors = true;
}

/// Back to the program's own setting.
inline void end_view_replay() {
  if (std::exchange(*replays_for_dtensors, false)) c10::AutogradState::get_tls_state().set_view_replay_enabled(false);
}

/// At its end views are replayed or not as they were at its begin. For code that makes DTensors amid a plain computation.
class KeepViewReplay {
 public:
  KeepViewReplay() = default;
  ~KeepViewReplay() {
    c10::AutogradState::get_tls_state().set_view_replay_enabled(was_enabled_);
    *replays_for_dtensors = was_for_dtensors_;
  }
  KeepViewReplay(const KeepViewReplay&) = delete;
  KeepViewReplay& operator=(const KeepViewReplay&) = delete;

 private:
  bool was_enabled_ = c10::AutogradState::get_tls_state().get_view_replay_enabled();
  bool was_for_dtensors_ = *replays_for_dtensors && was_enabled_; // not where the program switched it off since
};

} // namespace tessera::internal
