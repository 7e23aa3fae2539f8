#pragma once

// Internal: batch normalization whose statistics are those of the rows of many ranks.

#include <ATen/core/Tensor.h>

#include <string>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// The ranks whose rows make one batch, and what their collectives are called.
struct BatchRanks {
  CommunicatorPtr communicator;
  std::string label;
};

/// All ranks of `mesh`. Every one of them calls it; errors name `function`.
BatchRanks batch_ranks(const DeviceMesh& mesh, const std::string& label, const char* function);

/// The arguments of at::batch_norm.
struct BatchNormArguments {
  int64_t channels;                     ///< the input's, on every rank
  at::Tensor weight, bias;              ///< undefined: not affine
  at::Tensor running_mean, running_var; ///< undefined: not tracked
  bool uses_batch = true;               ///< normalizes with the batch's statistics, otherwise with the running ones
  double momentum = 0.1, eps = 1e-5;
};

/// at::batch_norm of `input` [N, C, …]. With the batch's statistics they are those of all ranks' rows, and every rank calls it,
/// also one without rows; so is the backward's part of them. Ranks exchange 2 C + 2 doubles in forward, and 2 C in backward where
/// the input of one of them requires a gradient. An input that is wrong on one rank is an error on all, which names the rank; so
/// is such a backward when a rank ran the forward without grad mode.
/// `input` in half precision is computed with in float, beside parameters and statistics of any floating-point dtype; the result
/// has the input's dtype.
at::Tensor batch_norm_over(const BatchRanks& ranks, const at::Tensor& input, const BatchNormArguments& arguments);

} // namespace tessera::internal
