#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/container/inlined_vector.h>

#include <optional>
#include <string>

#include <tessera/dtensor/rules/rule.h>

namespace tessera::dispatch {

enum class ArgKind : uint8_t {
  kTensor,     ///< Tensor or Tensor?
  kTensorList, ///< Tensor[] or Tensor?[]
  kStatic,     ///< placements may depend on its value
  kDynamic,    ///< they do not (scales, seeds)
};

/// What the fallback needs to know of an operator, read from its schema once.
struct OpInfo {
  struct Argument {
    ArgKind kind;
    bool written = false;
    bool out = false; ///< out= argument: written only
  };
  struct Return {
    int written_argument = -1; ///< the argument that this return is
    bool view = false;         ///< shares memory with an argument that is not written
  };
  std::string name; ///< "aten::add.Tensor"
  absl::InlinedVector<Argument, 8> arguments;
  absl::InlinedVector<Return, 2> returns;
  const rules::Rule* rule = nullptr;
  std::optional<c10::DispatchKey> decomposition; ///< without a rule: the kernel that runs it as other operators
  bool replicates = false;                       ///< without either: the rule is to run it on whole tensors
  bool infers_shapes = false;                    ///< has a kernel for the Meta device
  bool writes = false;
  bool views = false;
  bool backward_matters = false; ///< writes, or joins lists: what autograd's formulas may do with temporaries and plain zeros
};

/// The information of `op`, kept for the life of the process.
const OpInfo& op_info(const c10::OperatorHandle& op);

} // namespace tessera::dispatch
