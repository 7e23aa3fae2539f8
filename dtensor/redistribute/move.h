#pragma once

// Internal: what the differentiable functions of the API share.

#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include <tessera/dtensor/redistribute_options.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

/// An error where `tensor` is a view that could not alias its base, because its data had to move or its part has gaps, and is
/// `written`, or is read after its base was written. (Tensors of InferenceMode do not tell the latter.)
void check_copy(const at::Tensor& tensor, const DTensorMeta& meta, bool written, std::string_view function);

/// The meta of a DTensor that may be read; an error that names `function` for any other tensor.
DTensorMeta& meta_of(const at::Tensor& tensor, const char* function);

/// A new DTensor with the values of `tensor` under other placements on its mesh, outside autograd; an alias where nothing
/// changes.
at::Tensor move(const at::Tensor& tensor, const Placements& placements, const char* label);

/// What DTensor::redistribute does, in autograd's graph where grad mode asks for it; `label` names the call in errors.
at::Tensor differentiable_move(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements, const char* label,
                               const RedistributeOptions& options = {});

/// What a function takes in autograd's graph for `tensor`: `DTensorMeta::leaf_in_graph` of one that has another leaf there.
at::Tensor in_graph(const at::Tensor& tensor);

/// Whether a plain tensor may be zeros that a derivative formula of PyTorch's made, the same on every rank.
bool has_only_zeros(const at::Tensor& plain);

/// A gradient that flows back to a function whose result was a DTensor like `like`. PyTorch's derivative formulas may give plain
/// zeros, the same on every rank, which become Replicate; any other plain tensor is an error that names `function`.
at::Tensor gradient_as_dtensor(const at::Tensor& gradient, const Spec& like, const char* function);

/// Makes a DTensor of `spec`'s layout, in row-major order, of what a redistribution gave. A result that aliases `source` is
/// copied.
at::Tensor wrap_moved(at::Tensor local, const at::Tensor& source, const Spec& spec);

/// Keeps a spec in an AutogradContext under `name`, and finds it again.
void save_spec(torch::autograd::AutogradContext* context, const SpecPtr& spec, const char* name = "spec");
SpecPtr saved_spec(torch::autograd::AutogradContext* context, const char* name = "spec");

inline bool needs_graph(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

} // namespace tessera::internal
