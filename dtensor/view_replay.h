#pragma once

// Internal: whether autograd notes, with each view that this thread makes, how to make it again. Without it an in-place op on a
// view of a DTensor comes back as `as_strided` on the global geometry, which no rule can serve. Autograd asks after the operator
// has run, so making a DTensor turns it on and cannot turn it off; views of plain tensors pay for it until someone does.

#include <c10/core/AutogradState.h>

namespace tessera {

inline void set_view_replay(bool enabled) { c10::AutogradState::get_tls_state().set_view_replay_enabled(enabled); }

/// At its end views are replayed or not as they were at its begin. For code that makes DTensors amid a plain computation.
class KeepViewReplay {
 public:
  KeepViewReplay() = default;
  ~KeepViewReplay() { set_view_replay(was_enabled_); }
  KeepViewReplay(const KeepViewReplay&) = delete;
  KeepViewReplay& operator=(const KeepViewReplay&) = delete;

 private:
  bool was_enabled_ = c10::AutogradState::get_tls_state().get_view_replay_enabled();
};

} // namespace tessera
