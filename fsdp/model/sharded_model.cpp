#include <tessera/fsdp/model/sharded_model.h>

#include <algorithm>

#include <tessera/fsdp/group/sharded_parameter.h>

namespace tessera::internal {

using torch::nn::Module;

ShardedModel::Claim ShardedModel::claim_on(const Module* module) const {
  const auto found = claims_.find(module);
  return found == claims_.end() || !found->second.first.get() ? Claim::kNone : found->second.second;
}

void ShardedModel::claim(const Module* module, Claim claim) {
  const auto [at, is_new] = claims_.try_emplace(module, module, claim);
  if (is_new) return;
  auto& [reference, known] = at->second;
  known = reference.get() ? std::max(known, claim) : claim;
  reference = ModuleReference(module);
}

void ShardedModel::ignore(const at::Tensor& parameter) {
  ignored_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                            c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()));
}

bool ShardedModel::ignores(const at::Tensor& parameter) const {
  const auto found = ignored_.find(parameter.unsafeGetTensorImpl());
  return found != ignored_.end() && !found->second.expired() && !parameter_meta(parameter); // a later call may have taken it
}

void ShardedModel::take(ShardedModel& other) {
  if (claims_.size() < other.claims_.size()) claims_.swap(other.claims_); // the smaller goes into the greater
  for (const auto& [module, theirs] : std::exchange(other.claims_, {})) {
    if (theirs.first.get()) claim(module, theirs.second);
  }
  ignored_.merge(other.ignored_);
}

} // namespace tessera::internal
