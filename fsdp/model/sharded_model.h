#pragma once

// Internal: what belongs to a model as a whole.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/container/flat_hash_map.h>

#include <tessera/fsdp/model/module_reference.h>

namespace tessera::internal {

class Schedule;
class ShardedModule;

/// What the modules of a model share that one `fully_shard` call made or completed. The root makes it, and gives it to those
/// below in `settle`.
class ShardedModel {
 public:
  std::weak_ptr<ShardedModule> root;
  std::shared_ptr<Schedule> schedule;
  int64_t number = 0;                     ///< in the labels of its groups
  std::vector<std::string> settled_names; ///< of all its parameters when it was settled last: some may be gone by now
  bool warned_of_boundary = false, warned_of_rounding = false;

  /// How the calls that made the model met a module.
  enum class Claim { kNone, kBelow, kHeld };
  Claim claim_on(const torch::nn::Module* module) const;
  void claim(const torch::nn::Module* module, Claim claim);
  /// `parameter` is one of the ignored parameters of such a call.
  void ignore(const at::Tensor& parameter);
  bool ignores(const at::Tensor& parameter) const;
  /// Takes claims and ignored parameters of `other`, which becomes a part of this model.
  void take(ShardedModel& other);

 private:
  absl::flat_hash_map<const torch::nn::Module*, std::pair<ModuleReference, Claim>> claims_;
  absl::flat_hash_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> ignored_;
};

} // namespace tessera::internal
