#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace tessera {

namespace internal {
class ShardedModule;
}

/// While it lives, a backward of the sharded modules in `module` keeps this rank's gradients and communicates nothing: gradient
/// accumulation. Only where the backward runs counts, not where its forward did. The next backward outside adds what was kept,
/// and reduces all of it. Scopes may nest or overlap: at the end of the last one counts what is set, before them or inside.
///
/// Until then a tensor without values stands in `grad()`, and an optimizer or clipping that reads it throws an error with the
/// parameter's name. Local, and every rank opens and closes it for the same backwards. It does nothing for a model that was never
/// sharded, so that one loop serves one process too. An error for a part of a module that was sharded as a whole, and for one
/// that trains such a part of another model. Semantics:
/// no_sync of PyTorch's DistributedDataParallel, set_requires_gradient_sync of FSDP2.
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
