#pragma once

// Internal: the parameters that a step updates, and the state that it begins with.

#include <torch/optim/optimizer.h>

#include <absl/container/flat_hash_set.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

/// A parameter that has a gradient.
template <typename State, typename Options>
struct Stepped {
  at::Tensor parameter;
  at::Tensor gradient; ///< lies as the parameter does and has its dtype
  State* state;        ///< made with its default constructor at the first step
  const Options* options;
};

/// The gradient as a step needs it: it lies as `parameter` does, which takes a collective where it does not, and has its dtype.
/// Errors: one that is sparse or complex, or waits for its reduction.
at::Tensor aligned_gradient(const at::Tensor& parameter);

/// Counts a write of `parameter` that a kernel is about to make in the memory of its part, and waits for what still reads it.
void announce_write(const at::Tensor& parameter);

/// Zeros that lie as `parameter` does, of another dtype.
at::Tensor zeros_as(const at::Tensor& parameter, at::ScalarType dtype);

/// A tensor of zeros that every rank holds whole, of the parameter's dtype if it is left out: a DTensor on the mesh of
/// `parameter`, or a plain tensor as that is; where the memory of `parameter` is.
at::Tensor replicated_zeros(const at::Tensor& parameter, const std::vector<int64_t>& sizes,
                            std::optional<at::ScalarType> dtype = std::nullopt);

/// Zeros of shape [ranks, …] (`sizes`), of which each rank of the parameter's mesh holds a row: a DTensor, or a plain tensor as
/// that is. An error, which `name` begins, where these are not as many ranks.
at::Tensor by_rank_zeros(const at::Tensor& parameter, const std::vector<int64_t>& sizes, at::ScalarType dtype,
                         const std::string& name);

/// The parameters of `optimizer` that have a gradient, in its order. One that is listed again, as LibTorch's `parameters()` lists
/// a tied weight, counts once.
template <typename State, typename Options>
std::vector<Stepped<State, Options>> stepped_parameters(torch::optim::Optimizer& optimizer) {
  std::vector<Stepped<State, Options>> stepped;
  absl::flat_hash_set<const c10::TensorImpl*> listed;
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined() || !listed.insert(parameter.unsafeGetTensorImpl()).second) continue;
      auto& kept = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (!kept) kept = std::make_unique<State>();
      stepped.push_back({parameter, aligned_gradient(parameter), static_cast<State*>(kept.get()), &options});
    }
  }
  return stepped;
}

} // namespace tessera::internal
