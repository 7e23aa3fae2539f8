#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace tessera {

namespace internal {
class ShardedModule;
}

/// While it lives, a backward of the sharded modules in `module` keeps this rank's gradients and communicates nothing: gradient
/// accumulation. Only the backward must be inside the scope, not its forward. The next backward outside adds the gradients that
/// were kept, and reduces the sum. Scopes may nest or overlap. When the last scope ends, the setting that was made before the
/// scopes or inside them applies.
///
/// Until the gradients are reduced, `grad()` is a tensor without values, and an optimizer or clipping that reads it throws an
/// error with the parameter's name. Local, and every rank opens and closes it for the same backwards. It does nothing for a model
/// that was never sharded, so that the same loop runs in one process. An error for a submodule of a module that was sharded as
/// one group. Also an error for a model that trains such a submodule of another model. Semantics: no_sync of PyTorch's
/// DistributedDataParallel, set_requires_gradient_sync of FSDP2.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(const torch::nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::shared_ptr<internal::ShardedModule>> modules_;
};

/// `const auto scope = tessera::no_sync(*module);`
inline NoSync no_sync(const torch::nn::Module& module) { return NoSync(module); }

} // namespace tessera
