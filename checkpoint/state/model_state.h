#pragma once

// Internal: the tensors of a module.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::internal {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases; ///< further names of the same tensor (tied parameters)
};

struct WhichTensors {
  bool frozen = true; ///< parameters that do not require grad too
  bool buffers = true;
};

/// The parameters of `module`, then its buffers, each tensor once.
std::vector<NamedTensor> named_tensors(const torch::nn::Module& module, const WhichTensors& which);

} // namespace tessera::internal
