#include <tessera/checkpoint/communication_state.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <absl/container/flat_hash_set.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera {

namespace internal {

namespace {

const std::string kCommunication = "communication.";
constexpr auto* kBeginAnew =
    ". Load without communication_state, and with LoadOptions::allow_unused, to begin with zeros (a Trainer: "
    "SaveOptions::other_settings)";

GroupGradients* gradients_of(const Held& held, const ParameterGroup& group) {
  for (const auto& [weak, gradients] : state_of_group(group).module_groups()) {
    if (weak.lock().get() == &group) return &gradients->get(held);
  }
  return nullptr;
}

/// The groups of the parameters of a module, whichever model they belong to.
std::vector<ParameterGroup*> groups_below(const torch::nn::Module& module) {
  std::vector<ParameterGroup*> groups;
  absl::flat_hash_set<const ParameterGroup*> seen;
  for (const auto& parameter : module.parameters()) {
    const auto* meta = parameter_meta(parameter);
    if (meta && seen.insert(meta->group).second) groups.push_back(meta->group);
  }
  return groups;
}

/// The dim of the stages of a pipeline; nothing where there are none.
std::optional<int64_t> stages_dim(const DeviceMesh& root) {
  const auto& names = root.dim_names();
  const auto found = std::find(names.begin(), names.end(), "pp");
  if (found == names.end() || root.size(found - names.begin()) == 1) return std::nullopt;
  return found - names.begin();
}

/// The ranks that have the group's entries: all, or in a pipeline those of the same stages.
DeviceMesh ranks_of_entries(const ParameterGroup& group) {
  const auto root = group.roles().mesh().root();
  const auto stages = stages_dim(root);
  if (!stages) return root.flatten();
  std::vector<int64_t> others;
  for (int64_t dim = 0; dim < root.ndim(); ++dim) {
    if (dim != *stages) others.push_back(dim);
  }
  const auto mesh = root.slice(others);
  return mesh.ndim() > 1 ? mesh.flatten() : mesh;
}

/// What the names of a group's entries begin with: its module's path, and which of its buckets it is. Roots of stages have all
/// the same path: in a pipeline it is the place among this rank's groups, which are those of its stages.
std::string prefix_of(const ParameterGroup& group, size_t place) {
  const auto root = group.roles().mesh().root();
  if (const auto stages = stages_dim(root))
    return fmt::format("{}pp_{}.group_{}.", kCommunication, root.local_rank(*stages), place);
  const auto path = group.owner->path(0);
  return kCommunication + (path.empty() ? "" : path + ".") +
         (group.part.number == 0 ? "" : fmt::format("bucket_{}.", group.part.number + 1));
}

/// A row of each rank. What lies on the host although the model does not is of a mesh there.
DTensor row_of_each_rank(const ParameterGroup& group, const at::Tensor& tensor) {
  auto mesh = ranks_of_entries(group);
  if (tensor.device().type() != mesh.device().type())
    mesh = make_device_mesh(tensor.device().type(), {mesh.size(0)}, mesh.rank_list());
  auto sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), 1);
  return from_local(tensor.view(sizes), mesh, {Shard{0}});
}

class CommunicationBinding final : public StateBinding {
 public:
  CommunicationBinding(std::string policy, int64_t ranks) : policy_(std::move(policy)), ranks_(ranks) {}

  void before_load(StateDict& state, const SavedState& saved) override {
    const auto found = saved.values.find(kCommunication + "ranks");
    if (found == saved.values.end()) // saved before there was any: it begins with zeros
      return state.erase_if([](const auto& entry) { return entry.name.starts_with(kCommunication); });
    if (!state.contains(kCommunication + "ranks")) return;
    const auto* ranks = std::get_if<int64_t>(&found->second);
    TORCH_CHECK(ranks && *ranks == ranks_, "the checkpoint has what the reductions in fewer bits keep of ",
                ranks ? std::to_string(*ranks) : "no number of", " ranks, but there are ", ranks_,
                ": it belongs to a rank, and cannot be divided again", kBeginAnew);
    const auto policy = saved.values.find(kCommunication + "policy");
    const auto* text = policy == saved.values.end() ? nullptr : std::get_if<std::string>(&policy->second);
    TORCH_CHECK(text && *text == policy_, "the checkpoint has what reductions of another policy keep: ", text ? *text : "none",
                ", and here it is ", policy_, kBeginAnew);
    check_shapes(state, saved);
  }

  void after_load(const StateDict& /*state*/) override {} // the tensors are the extensions' own
  std::string prefix() const override { return kCommunication; }
  std::string settings() const override { return policy_; }

 private:
  static void check_shapes(const StateDict& state, const SavedState& saved) {
    for (const auto& entry : state.entries()) {
      const auto found = saved.tensors.find(entry.name);
      if (!entry.is_tensor() || !entry.name.starts_with(kCommunication) || found == saved.tensors.end()) continue;
      const auto sizes = state.tensor(entry.name).sizes();
      TORCH_CHECK(sizes == c10::IntArrayRef(found->second.sizes), "the checkpoint's ", entry.name, " has the shape ",
                  c10::IntArrayRef(found->second.sizes), ", and here it is ", sizes,
                  ": the group's parameters, layout or strategy differ", kBeginAnew);
    }
  }

  std::string policy_;
  int64_t ranks_;
};

/// Adds what the extension of `group` keeps to `state`.
void add_kept(StateDict& state, const ParameterGroup& group, size_t place) {
  const ModelLock lock(schedule_of(group).mutex());
  auto* gradients = gradients_of(lock, group);
  const auto& policy = group.options().communication.reduction;
  if (!gradients || !policy || !trains_any(group)) return;
  const auto extension = gradients->reduction_extension();
  if (!extension) return;
  for (const auto& [name, tensor] : extension->state()) {
    state.add(prefix_of(group, place) + name, row_of_each_rank(group, tensor));
    state.set(kCommunication + "policy", policy->description());
    state.set(kCommunication + "ranks", group.roles().mesh().root().flatten().size(0));
  }
}

} // namespace

} // namespace internal

StateDict communication_state(const torch::nn::Module& module) {
  StateDict state;
  const auto groups = internal::groups_below(module);
  for (size_t i = 0; i < groups.size(); ++i) internal::add_kept(state, *groups[i], i);
  if (state.size() == 0) return state;
  const auto policy = state.value<std::string>(internal::kCommunication + "policy");
  const auto ranks = state.value<int64_t>(internal::kCommunication + "ranks");
  state.bind(std::make_shared<internal::CommunicationBinding>(policy, ranks));
  return state;
}

} // namespace tessera
