#pragma once

// Internal: kernels of the meta device, which have the shapes of results and compute nothing.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>

#include <tessera/base/meta_device.h>

namespace tessera::internal::shapes {

using at::IntArrayRef, at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The kernels that are registered for one key. They stay until the process ends.
class MetaLibrary {
 public:
  explicit MetaLibrary(c10::DispatchKey key);
  /// Registers a kernel of "aten::<name>", unless the operator has one for this key, or this LibTorch does not have the operator.
  template <typename Kernel>
  void add(const char* name, Kernel&& kernel) {
    if (lacks(name)) library_.impl(name, std::forward<Kernel>(kernel));
  }

 private:
  bool lacks(const char* name) const;

  c10::DispatchKey key_;
  torch::Library library_;
};

void add_element_wise(MetaLibrary& library);
void add_norms(MetaLibrary& library);
void add_attention(MetaLibrary& library);
void add_convolutions(MetaLibrary& library);
void add_pools(MetaLibrary& library);
void add_activations(MetaLibrary& library);
void add_losses(MetaLibrary& library);
void add_indexing(MetaLibrary& library);
void add_products(MetaLibrary& library);
void add_reductions(MetaLibrary& library);
void add_optimizers(MetaLibrary& library);

// Operators that take other ways on other devices are met above autograd.
void add_choice_of_attention(MetaLibrary& autograd);
void add_choice_of_dropout(MetaLibrary& autograd);
void add_choice_of_norms(MetaLibrary& autograd);

/// What an element-wise operator returns: broadcast, in the common dtype and the common order of the dims.
Tensor elementwise(std::initializer_list<Tensor> inputs);
/// Contiguous, of the tensor's dtype.
Tensor empty_of(const Tensor& like, IntArrayRef sizes);
Tensor empty_of(const Tensor& like, IntArrayRef sizes, at::ScalarType dtype);
/// A gradient as the tensor, undefined where it is not wanted.
Tensor gradient_like(const MaybeTensor& tensor, bool wanted);

} // namespace tessera::internal::shapes
