// The operators that most layers are made of, without the stack of the fallback, which takes longer than all that a plain read
// has to do. What is not such a read goes on to the fallback, which decides.

#include <ATen/ATen.h>
#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>

#include <tessera/activations/kept_results.h>
#include <tessera/dtensor/tensor/view_replay.h>
#include <tessera/reads/construction_mode.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal {

namespace {

/// The arguments of one call.
class PlainArguments {
 public:
  /// Whether all tensors but those of one owner are plain and need no cast, and whether a plain one is beside a parameter.
  bool are_all() const {
    const bool casts = read_.dtype && other_dtype_ && *other_dtype_ != *read_.dtype;
    return is_plain_ && read_.owner && !casts && (has_plain_ || !has_parameter_);
  }

  template <typename T>
  void look(const T& /*argument*/) {}
  void look(const std::optional<at::Tensor>& tensor) {
    if (tensor) look(*tensor);
  }
  void look(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto keys = tensor.key_set();
    if (!keys.has(kTouchKey)) return look_at_other(tensor);
    const auto* const kind = kind_of(tensor);
    const auto read = kind ? kind->plain_read(tensor) : PlainRead();
    is_plain_ = is_plain_ && read.owner && (!read_.owner || (read.owner == read_.owner && read.dtype == read_.dtype));
    read_ = read;
    has_parameter_ |= keys.has(kDTensorKey);
  }

 private:
  void look_at_other(const at::Tensor& tensor) {
    is_plain_ &= !tensor.key_set().has(kDTensorKey);
    has_plain_ |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (tensor.dim() == 0 || !tensor.is_floating_point()) return;
    is_plain_ &= !other_dtype_ || *other_dtype_ == tensor.scalar_type();
    other_dtype_ = tensor.scalar_type();
  }

  PlainRead read_;
  std::optional<at::ScalarType> other_dtype_; ///< of floating-point activations
  bool is_plain_ = true, has_plain_ = false, has_parameter_ = false;
};

using MaybePlain = c10::MaybeOwned<at::Tensor>;

template <typename T>
const T& plain_of(const T& argument) {
  return argument;
}
MaybePlain plain_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kTouchKey)) return MaybePlain::borrowed(tensor);
  return MaybePlain::owned(kind_of(tensor)->plain(tensor));
}
std::optional<at::Tensor> plain_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(*plain_of(*tensor)) : std::nullopt;
}

template <typename T>
const T& value_of(const T& argument) {
  return argument;
}
const at::Tensor& value_of(const MaybePlain& tensor) { return *tensor; }

/// Whether the thread is in a scope in which a read is more than the values that it gets.
bool is_in_scope(c10::DispatchKeySet keys) {
  return keys.has_any(c10::autocast_dispatch_keyset) || KeptResults::Scope::active() || is_constructing_on_meta() ||
         !torch::jit::currentCallstack().empty();
}

template <typename Operator, typename Schema>
struct TypedRead;

template <typename Operator, typename Result, typename... Arguments>
struct TypedRead<Operator, Result(Arguments...)> {
  static Result call(c10::DispatchKeySet keys, Arguments... arguments) {
    PlainArguments all;
    (all.look(arguments), ...);
    if (!all.are_all() || is_in_scope(keys)) return fall_back(keys, std::forward<Arguments>(arguments)...);
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
    return run(below.remove(kDTensorKey), plain_of(arguments)...);
  }

 private:
  template <typename... Plain>
  static Result run(c10::DispatchKeySet keys, const Plain&... plain) {
    end_view_replay(); // a plain computation goes on
    auto result = Operator::redispatch(keys, value_of(plain)...);
    end_view_replay(); // autograd has asked
    return result;
  }
  static Result fall_back(c10::DispatchKeySet keys, Arguments... arguments) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Operator::name, Operator::overload_name);
    static const auto kernel = c10::KernelFunction::makeFromBoxedFunction<&on_read>();
    return kernel.call<Result, Arguments...>(op, keys, std::forward<Arguments>(arguments)...);
  }
};

/// Makes calls of an operator typed. It is one that writes nothing and takes no list of tensors.
template <typename Operator>
void read_typed(torch::Library& library) {
  const auto name = std::string(Operator::name) + (*Operator::overload_name ? "." : "") + Operator::overload_name;
  library.impl(name.c_str(), TORCH_FN((TypedRead<Operator, typename Operator::schema>::call)));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  read_typed<at::_ops::linear>(m);
  read_typed<at::_ops::matmul>(m);
  read_typed<at::_ops::mm>(m);
  read_typed<at::_ops::addmm>(m);
  read_typed<at::_ops::t>(m);
  read_typed<at::_ops::mul_Tensor>(m);
  read_typed<at::_ops::add_Tensor>(m);
  read_typed<at::_ops::embedding>(m);
  read_typed<at::_ops::layer_norm>(m);
  read_typed<at::_ops::native_layer_norm>(m);
  read_typed<at::_ops::native_layer_norm_backward>(m);
  read_typed<at::_ops::convolution>(m);
}

} // namespace tessera::internal
