#include <tessera/fsdp/setup/trains_apart.h>

#include <c10/util/Exception.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_set.h>

#include <string>
#include <vector>

#include <tessera/base/listing.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

namespace {

using NamedParameters = torch::OrderedDict<std::string, at::Tensor>;

/// The parameters that no model with a parameter among them was told to ignore.
NamedParameters without_ignored(const NamedParameters& parameters) {
  absl::flat_hash_set<const ShardedModel*> models; // few, where the groups may be thousands
  for (const auto& parameter : parameters) {
    if (const auto* meta = parameter_meta(parameter.value())) models.insert(&state_of_group(*meta->group).model());
  }
  NamedParameters kept;
  for (const auto& parameter : parameters) {
    const auto ignores = [&](const auto* model) { return model->ignores(parameter.value()); };
    if (!absl::c_any_of(models, ignores)) kept.insert(parameter.key(), parameter.value());
  }
  return kept;
}

} // namespace

std::vector<at::Tensor> parameters_not_ignored(const torch::nn::Module& module) {
  auto parameters = without_ignored(module.named_parameters()).values();
  absl::flat_hash_set<const c10::TensorImpl*> seen; // a tied one comes under each of its names
  std::erase_if(parameters, [&](const auto& each) { return !seen.insert(each.unsafeGetTensorImpl()).second; });
  return parameters;
}

std::vector<std::string> parameters_trained_apart(const torch::nn::Module& module) {
  bool any_sharded = false;
  std::vector<std::string> apart;
  for (const auto& parameter : without_ignored(module.named_parameters())) {
    const bool is_free_expert = expert_mark(parameter.value()) && !parameter_meta(parameter.value()); // maybe a DTensor of ep
    const bool is_sharded = dtensor_meta(parameter.value()) && !is_free_expert;
    any_sharded |= is_sharded;
    if (!is_sharded && parameter.value().requires_grad()) apart.push_back(parameter.key());
  }
  return any_sharded ? apart : std::vector<std::string>();
}

void check_none_trains_apart(const torch::nn::Module& module, const std::string& what, const std::string& accept) {
  const auto apart = parameters_trained_apart(module);
  TORCH_CHECK(apart.empty(), what, ": nothing sharded or replicated these parameters, beside others that are, so ",
              "that each rank trains its own copy of them:", listing(apart),
              "\nCall fully_shard or replicate on the module that holds them (on the root, mostly), freeze them, name them in "
              "FullyShardOptions::ignored_params, or ",
              accept);
}

} // namespace tessera::internal
