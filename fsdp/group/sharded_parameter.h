#pragma once

// Internal: a parameter of a group, and what stands for it where it is read.

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/buffers/memory_range.h>
#include <tessera/fsdp/buffers/node_reference.h>
#include <tessera/fsdp/buffers/unsharded_storage.h>
#include <tessera/fsdp/group/place.h>

namespace tessera::internal {

class ParameterGroup;
struct ParameterView;

/// A parameter's name, after what is said about it ("the gradient of ").
class ParameterName final : public TensorName {
 public:
  ParameterName(const char* about, std::weak_ptr<ParameterGroup> group, size_t index)
      : about_(about), group_(std::move(group)), index_(index) {}
  std::string to_string() const override;

 private:
  const char* about_;
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
};

/// The meta of a sharded parameter: a DTensor that knows its group.
struct ParameterMeta : ReadMeta {
  ParameterMeta(at::Tensor local, SpecPtr spec, ParameterGroup* owner, size_t position)
      : ReadMeta(std::move(local), std::move(spec), kShardedParameters), group(owner), index(position) {}
  bool places_gradient() const override { return false; } // LeafHook takes it
  /// Itself where it is the meta of a view of a parameter.
  virtual ParameterView* as_view() { return nullptr; }
  ParameterGroup* group; ///< null once all parameters of the group are gone: a detached copy may live longer
  size_t index;
  SpecPtr parallel; ///< that of the parameter
};

/// The meta of a sharded parameter or of a shallow copy of one (`detach`, `data`); null for any other tensor.
inline ParameterMeta* parameter_meta(const at::TensorBase& tensor) {
  auto* const read = read_meta(tensor);
  if (!read || read->kind != &kShardedParameters) return nullptr;
  auto* const meta = static_cast<ParameterMeta*>(read);
  return meta->group ? meta : nullptr;
}

/// What the program gave as a parameter.
struct ParameterOrigin {
  Place place;                          ///< below the modules of the group that has it
  std::optional<MemoryRange> memory;    ///< where the whole tensor was
  std::optional<Placement> chosen = {}; ///< by the program, along the shard dim
};

/// What forward reads.
struct ForwardForm {
  at::ScalarType dtype; ///< of the leaf
  /// How the DTensor lies that forward reads: the parameter was one, over dims of the mesh that are foreign to data parallelism
  /// (tensor parallelism). The leaf is this rank's part of it. Null for any other.
  SpecPtr parallel = {};
  std::shared_ptr<const ReadMark> mark = nullptr; ///< of that DTensor, where it is of a kind
};

/// The strides of a parameter.
struct ParameterStrides {
  std::vector<int64_t> whole = {}; ///< where it is not row-major (channels_last); otherwise empty
  /// With `whole`: this rank's part has them too. It is row-major where a cut falls inside a row, and the whole gets them after
  /// each gather.
  bool are_in_shards = false;

  /// The strides of this rank's part, or of what lies as it does; empty where it is row-major.
  c10::IntArrayRef shard() const { return are_in_shards ? c10::IntArrayRef(whole) : c10::IntArrayRef(); }
  bool are_made_by_gathers() const { return !whole.empty() && !are_in_shards; }
};

/// Leaves that are read in place of the plain one with a gradient.
struct OtherLeaves {
  at::Tensor among_dtensors = {}; ///< in grad mode; made when first needed
  at::Tensor frozen = {};         ///< without a gradient, where the plain one has one for an earlier forward
};

struct ShardedParameter {
  // First, and together, what every read and every gradient takes.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor; ///< what the module and the optimizer hold
  at::Tensor leaf = {};                            ///< what forward ops read instead: plain, in the unsharded dtype
  OtherLeaves other_leaves = {};
  NodeReference accumulator = {}; ///< of the gradients of `leaf` and of `tensor`
  SpecPtr spec;
  c10::intrusive_ptr<ParameterMeta> meta = {};
  c10::intrusive_ptr<const TensorName> gradient_name;

  at::Tensor local = {}; ///< this rank's part, inside the shard
  ForwardForm forward;
  ParameterStrides strides = {};
  ParameterOrigin origin;
  std::optional<int64_t> stepped_in = {}; ///< the backward in which an optimizer has stepped it, until a forward reads it

  /// The shape of the leaf.
  const std::vector<int64_t>& unsharded_sizes() const {
    return forward.parallel ? forward.parallel->local_sizes() : spec->sizes();
  }
  int64_t unsharded_numel() const {
    return forward.parallel ? c10::multiply_integers(forward.parallel->local_sizes()) : spec->numel();
  }
};

/// Whether the program trains the parameter, as it set it, also where no forward has read the parameter since.
inline bool is_trained(const ShardedParameter& parameter) {
  return !parameter.tensor.expired() && parameter.tensor._unsafe_get_target()->requires_grad();
}

/// Whether autograd, which had saved the parameter, has made `tensor` of it.
bool is_saved_copy(const ShardedParameter& parameter, const at::Tensor& tensor);
/// Whether `tensor` is the parameter, and not its `detach()` or `data()`: itself, or as autograd hands it back that has saved it.
inline bool is_same_leaf(const ShardedParameter& parameter, const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl() == parameter.tensor._unsafe_get_target() || is_saved_copy(parameter, tensor);
}

/// The strides of a tensor without gaps, where they are not those of a row-major one; for any other none.
std::vector<int64_t> own_strides(const at::Tensor& tensor);

} // namespace tessera::internal
