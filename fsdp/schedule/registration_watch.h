#pragma once

// Internal: when a model is looked at for parameters that were registered since it was sharded.

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera::internal {

/// Knows which modules forwards read first and last, by the numbers of their first groups: another rank may read another bucket
/// of a module. Another forward has begun, without a backward since the last one, when the first module is read again after the
/// last one.
class RegistrationWatch {
 public:
  void begin_forward() {
    first_ = newest_ = 0;
    has_read_last_ = false;
  }
  /// The forward reads `module`, as its first one or not.
  void note_read(size_t module, bool is_first) {
    if (is_first) first_ = module;
  }
  /// It reads `module` for the first time. In the first forward of all the newest module is the last one so far.
  void note_new(size_t module, bool knows_order) {
    newest_ = module;
    if (!knows_order) last_ = module;
  }
  /// Returns whether this read of `module` begins another forward, as far as the modules tell. `begin_another` must follow then.
  bool is_another(size_t module) {
    if (module != last_) return has_read_last_ && module == first_;
    has_read_last_ = true;
    return false;
  }
  void begin_another() { has_read_last_ = false; }
  /// A backward has ended, which followed a forward.
  void end_forward() { last_ = newest_; }

  /// Whether an evaluation recorded the groups of this forward, and the model has not been looked at since.
  bool must_look_again(uint64_t forward) const { return looked_at_ != forward; }
  void note_look(uint64_t forward) { looked_at_ = forward; }

 private:
  size_t first_ = 0, newest_ = 0; // that the forward read, and its latest new one
  size_t last_ = 0;               // the newest one of the forward before; in the first, of the one that runs
  bool has_read_last_ = false;    // since the model was looked at
  uint64_t looked_at_ = 0;        // the forward in which the model was looked at anew
};

} // namespace tessera::internal
