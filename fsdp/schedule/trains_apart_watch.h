#pragma once

// Internal: a look for parameters that a program forgot to shard, in the first backwards of a model.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <functional>

namespace tessera::internal {

/// Finds parameters that a program forgot to shard at the first optimizer step of a model, by the shapes that they have: leaves
/// that take a gradient in the model's backwards, and that are written when the model's shards are. An input that takes a
/// gradient is no parameter: it is written between backwards that no step separates, or it has one holder, where a parameter has
/// its module and an optimizer.
class TrainsApartWatch {
 public:
  bool is_done() const { return is_done_; }
  void end() { is_done_ = true; }
  /// To be called at the start of each backward, from inside it, until it is done. `writes` changes when the shards are written.
  /// Warns where it finds some that are not ignored.
  void look(uint64_t writes, const std::function<bool(const at::Tensor&)>& is_ignored);
  /// To be called at the end of each backward.
  void count_holders();

 private:
  struct Leaf {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    size_t checksum; ///< when it was first seen; SGD writes `p.data()`, which counts no version
    bool is_input = false;
    bool is_written() const;
  };
  void remember_leaves(const std::function<bool(const at::Tensor&)>& is_ignored);
  /// Whether any was.
  bool warn_of_written() const;

  absl::flat_hash_map<const c10::TensorImpl*, Leaf> leaves_;
  static constexpr int kMostChanges = 10;   ///< of the shards, while the leaves stay as they are
  static constexpr int kMostUnchanged = 10; ///< backwards after which the leaves are looked at though no shard changed

  uint64_t writes_ = 0;
  int changes_ = 0, unchanged_ = 0;
  bool is_looking_ = false, is_done_ = false;
};

} // namespace tessera::internal
