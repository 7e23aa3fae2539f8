#pragma once

// Internal: what the origin of a call, and the scopes of this thread, allow there.

#include <ATen/core/ivalue.h>

#include <optional>

#include <tessera/base/per_thread.h>
#include <tessera/dtensor/calls/call_origin.h>

namespace tessera::internal::dispatch {

struct OpInfo;

/// What the calls of this thread are inside of.
struct Decompositions {
  int depth = 0;
  bool all_dtensors = false;    ///< one of which no argument is plain
  bool own_temporaries = false; ///< a decomposition that writes only its own tensors

  /// What the calls of a decomposition are inside of, of a call that is inside of this.
  Decompositions inside(bool has_only_dtensors, bool writes_argument) const;
};
const Decompositions& decompositions();
/// Whether a plain tensor counts as replicated: it is the same on every rank.
bool replicates_plain_tensors();

/// The calls that a decomposition makes.
class DecompositionScope {
 public:
  /// `all_dtensors`: no argument is plain, so that the plain tensors that it makes (masks, ranges) are the same on every rank.
  DecompositionScope(bool all_dtensors, bool writes_argument);

 private:
  const ScopedValue<Decompositions> current_;
};

/// The place that one call comes from. Autograd is asked only where the plan of any such call depends on it, or on demand.
class CallSite {
 public:
  /// `arguments` must live as long as this.
  CallSite(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);
  /// A derivative formula of autograd, or a decomposition that writes no argument, makes the call, as far as was asked: what it
  /// writes are temporaries of its own, whose placement may change, and the plain tensors that it makes (zeros) are the same on
  /// every rank.
  bool own_temporaries() const { return own_temporaries_; }
  /// Others share the memory of what it writes, whose placement must stay.
  bool shares_written() const { return shares_written_; }
  /// `own_temporaries`, after asking autograd. Where it adds up gradients too: a formula may have made zeros for one of them.
  bool ask_own_temporaries();
  /// A replicated argument has negative values.
  bool keeps_signs() const { return keeps_signs_; }
  void keep_signs() { keeps_signs_ = true; }

 private:
  /// A formula of autograd makes the call, or autograd sums up what formulas gave.
  bool is_of_formula();

  const OpInfo& info_;
  c10::ArrayRef<c10::IValue> arguments_;
  std::optional<CallOrigin> origin_; ///< once it was asked for
  bool own_temporaries_, shares_written_, keeps_signs_ = false;
};

} // namespace tessera::internal::dispatch
