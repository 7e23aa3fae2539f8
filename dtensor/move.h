#pragma once

// Internal: what the differentiable functions of the API share.

#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include <tessera/dtensor/dtensor_impl.h>

namespace tessera {

/// An error where `tensor` is a view that could not alias its base, because its data had to move, and is `written`, or is read
/// after its base was written. (Tensors of InferenceMode do not tell the latter.)
void check_copy(const at::Tensor& tensor, const DTensorMeta& meta, bool written, std::string_view function);

/// The meta of a DTensor that may be read; an error that names `function` for any other tensor.
DTensorMeta& meta_of(const at::Tensor& tensor, const char* function);

/// A new DTensor with the values of `tensor` under other placements on its mesh, outside autograd; an alias where nothing
/// changes.
at::Tensor move(const at::Tensor& tensor, const Placements& placements, const char* label);

/// Makes a DTensor of `spec`'s layout, in row-major order, of what a redistribution gave. A result that aliases `source` is
/// copied.
at::Tensor wrap_moved(at::Tensor local, const at::Tensor& source, const Spec& spec);

/// Keeps a spec in an AutogradContext, and finds it again.
void save_spec(torch::autograd::AutogradContext* context, const SpecPtr& spec);
SpecPtr saved_spec(torch::autograd::AutogradContext* context);

inline bool needs_graph(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

} // namespace tessera
