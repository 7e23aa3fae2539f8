#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/calls/collective_call.h>
#include <tessera/collectives/calls/signature.h>

#include <string>

namespace tessera::internal {

/// What one rank brings to a collective. Its tensors live until all have what they need of them.
struct Contribution {
  Signature signature;
  at::Tensor output = {}, input = {}; ///< as of a `CollectiveCall`
  AllToAllSplits splits = {};
  std::string text = {}; ///< names the call in errors
};

} // namespace tessera::internal
