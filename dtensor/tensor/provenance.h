#pragma once

// Internal: what a DTensor was computed from.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace tessera::internal {

/// What errors call a tensor, as "the gradient of blocks.0.weight". Put into words only when it is asked for.
struct TensorName : c10::intrusive_ptr_target {
  virtual std::string to_string() const = 0;
};

/// What a DTensor is or was computed from: for errors, and for reads without grad mode.
struct Provenance {
  c10::intrusive_ptr<const TensorName> name; ///< of this tensor, or of one that it was computed from; null for most
  bool computed = false;                     ///< by an operator: the name is that of one of its arguments
  /// Set on sharded parameters, and on what is computed from such alone without a gradient to come: where it meets a plain
  /// tensor, the whole of it is used, in this dtype. Without it such a mix is an error.
  std::optional<at::ScalarType> whole_dtype;
  /// Made from the shape of a sharded parameter alone (`ones_like`): beside a parameter in grad mode it counts as a plain tensor.
  bool of_shape_only = false;
  /// Shared with views, where this was computed or is an inference tensor: true once other values were written to one of them.
  std::shared_ptr<bool> overwritten;

  /// The `whole_dtype` where no other values were written, neither to the tensor nor to one that shares its memory.
  std::optional<at::ScalarType> current_whole_dtype() const { return overwritten && *overwritten ? std::nullopt : whole_dtype; }
  /// Other values go into the tensor, and so into all that share its memory.
  void forget_parameters() {
    whole_dtype.reset();
    if (overwritten) *overwritten = true;
  }
};

} // namespace tessera::internal
