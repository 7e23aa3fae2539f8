#pragma once

// Internal: whether a tensor was written.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace tessera::internal {

/// Tells whether a tensor, or another with the same version counter, was written since a look at it. It keeps no memory of it.
class VersionWatch {
 public:
  explicit VersionWatch(const at::Tensor& tensor) : version_(tensor.unsafeGetTensorImpl()->version_counter()), seen_(now()) {}
  void look() { seen_ = now(); }
  bool has_changed() const { return now() != seen_; }

 private:
  uint32_t now() const { return version_.enabled() ? version_.current_version() : 0; }
  c10::VariableVersion version_;
  uint32_t seen_;
};

} // namespace tessera::internal
