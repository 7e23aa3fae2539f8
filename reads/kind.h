#pragma once

// Internal: what a tensor is whose reads are seen, by the fallback of the key above autograd (fallback.cpp).

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <tessera/dtensor/rules/sets.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

class ReadCall;
struct OperatorTraits;

/// What a call meets among its arguments.
enum class Met : uint8_t {
  kPlain,    ///< a plain tensor that is no number
  kDTensor,  ///< a DTensor that must stay one
  kComputed, ///< a DTensor that was computed from sharded parameters alone, which is made whole beside a plain tensor
  kConstant, ///< … or from the shape of such a parameter (`ones_like`)
  kApart,    ///< DTensors on two devices, or on two meshes
  // What kinds say of their tensors:
  kParameter,        ///< a DTensor that stands for a whole, as a sharded parameter does, or a view of one
  kWrittenParameter, ///< … which the call writes
  kView,             ///< a view of such a parameter that was taken without grad mode
  kWrittenView,
  kWhole, ///< a plain tensor, the whole of a parameter or a view of it
  kWrittenWhole,
  kOffDevice, ///< a parameter that lies elsewhere than what forward reads of it
  kParallel,  ///< a parameter that forward reads as a DTensor
};
using MetSet = rules::EnumSet<Met>;

/// A read that gets `ReadKind::plain(tensor)` in the place of `tensor`, and changes nothing else.
struct PlainRead {
  const void* owner = nullptr; ///< whose memory is read; null where a read is more than that, or where it depends on the call
  std::optional<at::ScalarType> dtype = {}; ///< of floating-point activations beside it; with others the read is more than that
};

/// A kind of tensors, all of which have the key above autograd. It decides what a call gets in their place, what becomes of the
/// other arguments, and what leaves the call. There is one object of each, which has no state.
class ReadKind {
 public:
  /// Where a call meets tensors of several kinds, they run in this order.
  enum class Turn : uint8_t {
    kRefuses,     ///< its tensors have no values
    kSubstitutes, ///< another tensor takes the place of each, which may be of a later kind
    kAdapts,      ///< arguments move to where its tensors want them, and so do results
  };

  /// What a call meets in `tensor`, an argument at position `argument` or in a list there. It changes nothing.
  virtual MetSet meets(const at::Tensor& tensor, size_t argument, const OperatorTraits& traits) const = 0;
  /// Runs `call`: changes its arguments, lets the kinds after this one and the operator run (`ReadCall::proceed`), and changes
  /// the results. Or it leaves results on the stack by itself, or throws.
  virtual void on_read(ReadCall& call) const = 0;

  /// Says how a call that writes nothing reads `tensor` beside plain tensors alone. It changes nothing.
  virtual PlainRead plain_read([[maybe_unused]] const at::Tensor& tensor) const { return {}; }
  /// What takes the place of such a tensor, with its values.
  virtual at::Tensor plain(const at::Tensor& tensor) const { return tensor; }

  /// What `DTensorMeta::leaf_in_graph` gives for such a tensor.
  virtual at::Tensor leaf_in_graph([[maybe_unused]] const at::Tensor& tensor) const { return {}; }
  constexpr virtual ~ReadKind() = default;

  const Turn turn;

 protected:
  constexpr explicit ReadKind(Turn own) : turn(own) {}
};

/// What makes DTensors ones of a kind. Where a sharded parameter takes the place of one, it keeps the mark for what forward
/// reads.
struct ReadMark {
  /// Makes `dtensor` one of the kind, in place. `casts`: floating-point activations beside it are to have its dtype.
  virtual void put_on(const at::Tensor& dtensor, bool casts) const = 0;
  virtual ~ReadMark() = default;
};

/// The meta of each DTensor that has the key above autograd.
struct ReadMeta : DTensorMeta {
  ReadMeta(at::Tensor local_tensor, SpecPtr tensor_spec, const ReadKind& of)
      : DTensorMeta(std::move(local_tensor), std::move(tensor_spec)), kind(&of) {}
  /// What a sharded parameter keeps of it; null for nothing.
  virtual std::shared_ptr<const ReadMark> mark() const { return nullptr; }
  at::Tensor leaf_in_graph(const at::Tensor& self) const override { return kind->leaf_in_graph(self); }
  const ReadKind* kind;
};

/// The meta of such a DTensor; null for any other tensor.
inline ReadMeta* read_meta(const at::TensorBase& tensor) {
  constexpr auto both = c10::DispatchKeySet({kDTensorKey, kTouchKey});
  if (!tensor.defined() || !tensor.key_set().has_all(both)) return nullptr;
  return static_cast<ReadMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// The memory of plain tensors that have the key, and of their views, which inherit it.
class ReadStorage : public c10::StorageImpl {
 public:
  ReadStorage(c10::Device device, const ReadKind& of)
      : StorageImpl(use_byte_size_t(), 0, c10::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false), kind(&of) {}
  const ReadKind* const kind;
};

/// The kind of a tensor that has the key above autograd; null for a plain one whose memory was replaced (`set_`).
const ReadKind* kind_of(const at::Tensor& tensor);

} // namespace tessera::internal
