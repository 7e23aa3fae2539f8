#pragma once

#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/operator_traits.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

/// What an allocation of a tensor needs.
struct TensorLayout {
  static TensorLayout of(const at::Tensor& tensor);
  at::Tensor allocate() const; ///< on the device; undefined where it is

  bool is_defined = true;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

/// What a call gives, known before it is run.
struct Outcome {
  bool is_known = true;                                 ///< false where only running it tells
  std::vector<std::vector<TensorLayout>> returns;       ///< the tensors of each return
  std::vector<std::pair<size_t, TensorLayout>> resized; ///< arguments of `out=`

  /// Of arguments with these layouts and numbers: run once on meta tensors, or where the operator has no such kernel, on zeros of
  /// the CPU; then remembered. Throws what the operator throws for them.
  static std::shared_ptr<const Outcome> of(const c10::OperatorHandle& op, const Stack& arguments);
};

} // namespace tessera::testing::sim
