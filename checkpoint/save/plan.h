#pragma once

// Internal: which rank writes which part of which tensor.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/dtensor/layout/box.h>
#include <tessera/optim/state_value.h>

namespace tessera::internal {

/// What one rank holds of one tensor.
struct Holding {
  std::string name;
  std::vector<std::string> aliases;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes; ///< global shape
  std::string layout;
  std::string mesh; ///< of a DTensor; empty for a plain tensor, of which ranks may hold different data
  std::vector<Box> boxes;
  RankCopy copy; ///< of a plan's tensor
};

using StateValues = std::vector<std::pair<std::string, StateValue>>;

/// What one rank brings to a save.
struct RankState {
  std::vector<Holding> tensors;
  StateValues values;
};

Json to_json(const std::vector<Holding>& tensors);
std::vector<Holding> holdings_from_json(const JsonView& json);
Json to_json(const StateValues& values);
StateValues values_from_json(const JsonView& json);

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
  StateValues values;
};

/// Every part once: the same box held by several ranks goes to the one with the least to write so far (the largest parts are
/// placed first), plain tensors to the lowest rank. Every rank computes the same plan. Errors name the tensor and the ranks:
/// tensors of one name on different meshes, a dtype or shape that differs between ranks, parts that overlap or do not cover the
/// tensor.
std::vector<SavePlan::Tensor> plan_tensors(const std::vector<std::vector<Holding>>& ranks, const RankNumbers& numbers = {});

/// The values of all ranks, of each name one. An error for a value that differs between ranks.
StateValues merge_values(const std::vector<StateValues>& ranks, const RankNumbers& numbers = {});

/// An error for a name or alias that the plan holds twice.
void check_names(const SavePlan& plan);

/// Makes the plan of a save, and keeps it for the next one: while no rank's tensors change, ranks exchange only that.
class Planner {
 public:
  /// Every rank calls it. Errors as above, and a name that is a tensor and a value.
  const SavePlan& plan(const Ranks& ranks, const RankState& state);

 private:
  uint64_t own_tensors_ = 0; ///< checksum of what this rank held when the plan was made
  bool has_plan_ = false;
  SavePlan plan_;
};

} // namespace tessera::internal
