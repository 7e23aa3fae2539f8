#pragma once

// Internal: looks for the module that made a number which is not finite.

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include <tessera/training/loop/step/agreement.h>

namespace tessera::internal {

/// Runs `again` under a NanGuard and returns what that has found, the same on every rank; "" where it has found nothing, or where
/// there can be no guard: the program has one, or the ranks are not all of the job. Every rank calls it.
std::string find_non_finite(const torch::nn::Module& module, const Agreement& agreement, bool is_nan,
                            const std::function<void()>& again);

} // namespace tessera::internal
