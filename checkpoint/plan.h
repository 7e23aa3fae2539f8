#pragma once

// Internal: which rank writes which part of which tensor.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/box.h>
#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

/// What one rank holds of one tensor.
struct Holding {
  std::string name;
  std::vector<std::string> aliases;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes; ///< global shape
  std::string layout;
  bool plain = true; ///< no DTensor: ranks may hold different data, the lowest rank's is saved
  std::vector<Box> boxes;
};

/// What one rank brings to a save.
struct RankState {
  std::vector<Holding> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
};

RankState describe(const StateDict& state);
Json to_json(const RankState& state);
RankState rank_state_from_json(const JsonView& json);

/// A box and the rank that writes it.
struct Assignment {
  Box box;
  int rank = 0;
};

/// The whole state: its tensors in the order of the lowest rank that has them.
struct SavePlan {
  struct Tensor {
    Holding what; ///< of the lowest rank that has it; `boxes` is not used
    std::vector<Assignment> parts;
  };
  std::vector<Tensor> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
};

/// Every part once: the same box held by several ranks goes to the one with the least to write so far (the largest parts are
/// placed first), plain tensors to the lowest rank. Every rank computes the same plan. Errors name the tensor or value and the
/// ranks: a dtype, shape or value that differs between ranks, parts that overlap or do not cover the tensor, one name for a
/// tensor and a value.
SavePlan plan_save(const std::vector<RankState>& ranks);

} // namespace tessera::checkpoint
