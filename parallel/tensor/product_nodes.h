#pragma once

// Internal: the nodes of products that run beside their collectives, in autograd's graph.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <string>

#include <tessera/collectives/counters.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/program_scopes.h>
#include <tessera/parallel/overlap/chunked_product.h>
#include <tessera/parallel/tensor/gather_again.h>

namespace tessera::internal::parallel {

/// What the backward of a layer knows of its forward.
struct LayerContext : torch::CustomClassHolder {
  std::string label;
  int64_t chunks = 1;
  SpecPtr source;                                          ///< of the activation before it entered
  SpecPtr result;                                          ///< of what leaves
  torch::autograd::SavedVariable input;                    ///< the whole activation, of a layer that gathers
  std::shared_ptr<const GatherAgain::Activation> gathered; ///< in its place; null for none
  std::shared_ptr<const int64_t> readers;                  ///< of the activation
};
using ContextPtr = c10::intrusive_ptr<LayerContext>;

inline const Spec& spec_of(const at::Tensor& dtensor) { return *dtensor_meta(dtensor)->spec; }
inline const Placement& placement_of(const at::Tensor& dtensor) { return spec_of(dtensor).placements()[0]; }

/// The dim of the positions, where `placement` splits an activation of `ndim` dims over one that is no feature.
std::optional<int64_t> sequence_dim(const Placement& placement, int64_t ndim);

/// A spec in row-major order of an activation like `like`, with other features.
SpecPtr spec_like(const Spec& like, const Placement& placement, int64_t features);

/// `part`, a DTensor whose sequence is split, gathered beside its product with the local tensor `weight` [in, out]. Outside
/// autograd.
GatheredProduct gather_parts(const at::Tensor& part, const at::Tensor& weight, int64_t chunks, const std::string& label);

/// `product` in autograd's graph: `whole` · `weight` of an activation that was gathered meanwhile.
at::Tensor gathered_in_graph(const at::Tensor& whole, const at::Tensor& weight, const at::Tensor& product,
                             const ContextPtr& layer);

/// `sum` in autograd's graph: this rank's positions of the sum of all `input` · `weight`.
at::Tensor scattered_in_graph(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& sum, const ContextPtr& layer);

/// Runs a move that no DTensor sees, and notes it where the program wants moves noted.
template <typename Run>
auto noted(const std::string& label, const Spec& from, const Placement& to, const Run& run) {
  auto* const log = program_scopes().log;
  if (!log) return run();
  const CountCollectives collectives;
  auto result = run();
  add_record(*log, {label, from.sizes(), from.placements(), {to}, collectives.total_bytes()});
  return result;
}

} // namespace tessera::internal::parallel
