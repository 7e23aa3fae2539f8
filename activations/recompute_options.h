#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <string>

#include <tessera/activations/tensor_place.h>

namespace c10 {
class OperatorHandle;
}

namespace tessera {

/// Whether the results of this call of an operator are kept for the second run of a recomputed function, which then does not run
/// the operator again. It is asked below autograd, in the first run only, for each operator that writes nothing and returns no
/// views: for `aten::addmm`, and not for `aten::linear`, which is made of it.
using KeepPolicy = std::function<bool(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments)>;

/// Options of `recompute`.
struct RecomputeOptions {
  /// What errors call the function. Empty: its class.
  std::string name;
  /// false: the function draws no random numbers, so the generators' state is not kept. A function that draws some is an error.
  bool keep_rng_state = true;
  /// The second run ends as soon as backward has all that it needs. false: it runs to its end, where the outputs of both runs are
  /// compared too.
  bool early_stop = true;
  /// Operators whose results are kept, so that the second run does not compute them again. Empty: none.
  KeepPolicy keep;
  /// The place of the inputs and of what `keep` chose until backward. Empty: in the place of the scope around the call
  /// (`saved_tensors_in`), and without one where they are.
  TensorPlace place;
};

} // namespace tessera
