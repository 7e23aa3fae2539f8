#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace tessera::testing::sim {

/// What the schema of an operator tells of how it must be run.
struct OperatorTraits {
  enum class Kind {
    kPlain,
    kView,
    kSynchronous, ///< what it returns depends on values: the host must wait for it
    kRandom
  };
  struct Return {
    std::optional<size_t> argument; ///< that it is; none for a new tensor
    bool is_list = false;
  };

  Kind kind = Kind::kPlain;
  std::vector<bool> is_written; ///< by argument
  std::vector<Return> returns;
  bool reads_tensors = false; ///< the results depend on their values

  static const OperatorTraits& of(const c10::OperatorHandle& op);
};

} // namespace tessera::testing::sim
