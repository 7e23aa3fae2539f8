#pragma once

// Internal: errors of LibTorch's derivative formulas that do not say what a program is to change.

#include <exception>
#include <string>

namespace tessera::internal {

/// Adds to `error`, which the node `node` of a backward has thrown, what is wrong with a loss of two dtypes and the remedy.
void explain_backward_error(const std::string& node, std::exception& error);

} // namespace tessera::internal
