#pragma once

#include <optional>
#include <string>

#include <tessera/dtensor/calls/call_schema.h>
#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::dispatch {

/// What the fallback needs to know of an operator, read once. Where the rule reads numbers, these are kStatic.
struct OpInfo : CallSchema {
  std::string name; ///< "aten::add.Tensor"
  const rules::Rule* rule = nullptr;
  std::optional<c10::DispatchKey> decomposition; ///< without a rule, or by one: the kernel that runs it as other operators
  bool replicates = false;                       ///< without either: runs on whole tensors
  bool infers_shapes = false;                    ///< has a kernel for the Meta device
  bool reads_no_value = false;                   ///< zeros_like, new_full and their kin
  bool is_backward = false; ///< a derivative, whose kernel may read what the forward saved as if it were dense
  /// The op writes an argument or takes a list of tensors. Inside a derivative formula of autograd its plain arguments may be
  /// zeros that the formula made, so the plan depends on where the call comes from.
  bool plan_depends_on_caller = false;
};

/// The information of `op`, kept for the life of the process.
const OpInfo& op_info(const c10::OperatorHandle& op);

} // namespace tessera::internal::dispatch
