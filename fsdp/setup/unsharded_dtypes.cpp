#include <tessera/fsdp/setup/unsharded_dtypes.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <tessera/nn/follow_scripts.h>
#include <tessera/nn/sync_batch_norm.h>

namespace tessera::internal {

namespace {

using torch::nn::Module;

/// "BatchNorm2d" of torch::nn::BatchNorm2dImpl.
std::string_view short_type(std::string_view type) {
  const auto colon = type.substr(0, type.find('<')).rfind("::");
  if (colon != std::string_view::npos) type.remove_prefix(colon + 2);
  if (type.ends_with("Impl")) type.remove_suffix(4);
  return type;
}

/// Whether `entry` is the whole of `path` or its last parts.
bool ends_path(std::string_view path, std::string_view entry) {
  if (!path.ends_with(entry)) return false;
  return path.size() == entry.size() || path[path.size() - entry.size() - 1] == '.';
}

/// What `keep_in_fp32` names among the modules and parameters of a walk.
class Kept {
 public:
  Kept(const ModuleWalk& walk, const std::vector<std::string>& entries) : entries_(entries) {
    if (entries.empty()) return;
    for (const auto& visit : walk.visits()) { // from the top: what is above a module comes before it
      const auto path = walk.place_of(visit).path;
      modules_.push_back((!visit.is_top() && modules_[visit.above]) || names_module(*visit.module, path));
      for (const auto& item : Registry::parameters(*visit.module)) {
        if (!item.value().defined()) continue;
        if (modules_.back() || names_path(walk.place_of(visit, item.key()).path)) insert(item.value());
      }
    }
  }

  bool contains(const at::Tensor& parameter) const { return parameters_.contains(parameter.unsafeGetTensorImpl()); }

 private:
  bool names_path(const std::string& path) const {
    return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) { return ends_path(path, entry); });
  }
  bool names_module(const Module& module, const std::string& path) const {
    const auto& type = module.name();
    const auto is_type = [&](const std::string& entry) { return entry == type || entry == short_type(type); };
    return names_path(path) || std::any_of(entries_.begin(), entries_.end(), is_type);
  }
  void insert(const at::Tensor& parameter) { parameters_.insert(parameter.unsafeGetTensorImpl()); }

  const std::vector<std::string>& entries_;
  std::vector<bool> modules_; // one a visit
  absl::flat_hash_set<const c10::TensorImpl*> parameters_;
};

/// LibTorch's norms with running statistics.
template <typename... Norms>
struct AnyOf {
  /// The running mean; undefined for any other module, and where there is none.
  static at::Tensor running_mean(Module& module) {
    auto mean = running_mean_of_script(module);
    (
        [&] {
          if (const auto* norm = module.as<Norms>()) mean = norm->running_mean;
        }(),
        ...);
    return mean;
  }
};
using RunningNorms = AnyOf<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl,
                           torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl, torch::nn::InstanceNorm3dImpl>;

} // namespace

std::vector<at::ScalarType> unsharded_dtypes(const ModuleWalk& walk, const std::vector<at::Tensor>& parameters,
                                             const MixedPrecisionPolicy& policy) {
  const Kept kept(walk, policy.keep_in_fp32);
  std::vector<at::ScalarType> dtypes;
  for (const auto& parameter : parameters) {
    const bool is_cast = parameter.is_floating_point() && policy.param_dtype;
    dtypes.push_back(!is_cast ? parameter.scalar_type() : kept.contains(parameter) ? at::kFloat : *policy.param_dtype);
  }
  return dtypes;
}

void check_norms(const ModuleWalk& walk, const std::vector<at::Tensor>& parameters, const std::vector<at::ScalarType>& dtypes,
                 std::optional<at::ScalarType> dtype) {
  const auto dtype_of = [&](const at::Tensor& tensor) {
    return dtype && tensor.is_floating_point() ? *dtype : tensor.scalar_type();
  };
  absl::flat_hash_map<const c10::TensorImpl*, size_t> positions;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (dtypes[i] != dtype_of(parameters[i])) positions.emplace(parameters[i].unsafeGetTensorImpl(), i); // those that are cast
  }
  if (positions.empty()) return;
  for (const auto& visit : walk.visits()) {
    const auto mean = RunningNorms::running_mean(*visit.module);
    if (!mean.defined() || is_synchronized(mean)) continue;
    for (const auto& item : Registry::parameters(*visit.module)) {
      const auto found = item.value().defined() ? positions.find(item.value().unsafeGetTensorImpl()) : positions.end();
      if (found == positions.end() || dtypes[found->second] == dtype_of(mean)) continue;
      const auto name = walk.name(walk.place_of(visit));
      const auto type = std::string(short_type(visit.module->name()));
      const auto keep = dtype_of(mean) == at::kFloat ? "keep it in fp32 with policy.keep_in_fp32 = {\"" + type + "\"}, or " : "";
      TORCH_CHECK_VALUE(false, "fully_shard: the norm ", name.empty() ? type : name + " (" + type + ")",
                        " would compute with its ", item.key(), " in ", dtypes[found->second], " beside running statistics in ",
                        dtype_of(mean), ", which its kernel cannot mix: ", keep,
                        "shard it by itself, before, without a param_dtype");
    }
  }
}

} // namespace tessera::internal
