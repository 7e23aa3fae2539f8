#pragma once

// Running the calls of opinfo_calls.h on DTensors, and comparing with plain tensors.

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include <tessera/tests/dtensor/agreement.h>
#include "opinfo_calls.h"

namespace tessera::testing {

/// What one call gives: its tensors, what it wrote, the gradients of its inputs.
struct OpResult {
  std::vector<at::Tensor> outputs, written, gradients;
  bool narrow = false; ///< an argument has a type narrower than double: results are compared as such
};

/// `whole` as `output` lies, with Replicate for Partial.
at::Tensor placed_as(const at::Tensor& whole, const DTensor& output);

/// How a call is run.
struct OpStage {
  /// What the call gets for an argument.
  std::function<at::Tensor(const at::Tensor& tensor, size_t index)> place;
  std::function<void()> between = [] {}; ///< runs after the forward and after the backward
  /// What the backward gets for the gradient `whole` of a DTensor.
  std::function<at::Tensor(const at::Tensor& whole, const DTensor& output)> place_gradient = placed_as;
};

/// On copies of the plain arguments.
OpStage plain_stage();

/// Runs `call`, and its backward where an argument requires grad.
OpResult run_call(const OpCall& call, const OpStage& stage);

/// How the DTensors of `actual` differ from the plain tensors of `expected`; empty where they do not. Every rank calls it.
std::string difference(const OpResult& actual, const OpResult& expected, bool outputs_too);

/// "aten::add.Tensor".
std::string name_of(const c10::OperatorHandle& op);

/// "aten::add.Tensor([2] (Shard(0)), [2] (Replicate()), 1, )".
std::string describe(const OpCall& call, const std::vector<Placements>& placements);

/// Picks one option for each of several lists: all products, or `limit` of them, seeded, in which every pair of options of two
/// lists comes as early as it can.
std::vector<std::vector<size_t>> pick_products(const std::vector<size_t>& counts, size_t limit, std::mt19937& random);

template <typename Option>
std::vector<std::vector<size_t>> pick_products(const std::vector<std::vector<Option>>& options, size_t limit,
                                               std::mt19937& random) {
  std::vector<size_t> counts;
  for (const auto& list : options) counts.push_back(list.size());
  return pick_products(counts, limit, random);
}

/// The exported files: those of the OpInfos named by TESSERA_OPINFO_ONLY, or all; none without TESSERA_OPINFO_CALLS.
std::vector<std::filesystem::path> opinfo_files();

} // namespace tessera::testing
