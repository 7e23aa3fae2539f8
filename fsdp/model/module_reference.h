#pragma once

// Internal: a module that others own.

#include <torch/nn/module.h>

#include <memory>

namespace tessera::internal {

/// The identity of a module. A module that is made at the address of one that is gone is another one.
class ModuleReference {
 public:
  explicit ModuleReference(const torch::nn::Module* module)
      : module_(module), life_(module->weak_from_this()), is_shared_(!life_.expired()) {}

  /// Null once the module is gone, as far as that can be known: of one that no shared_ptr holds it cannot.
  const torch::nn::Module* get() const { return is_shared_ && life_.expired() ? nullptr : module_; }
  /// Null for a module that no shared_ptr holds as well.
  std::shared_ptr<const torch::nn::Module> lock() const { return life_.lock(); }

 private:
  const torch::nn::Module* module_;
  std::weak_ptr<const torch::nn::Module> life_;
  bool is_shared_;
};

} // namespace tessera::internal
