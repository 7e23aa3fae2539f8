#include <tessera/fsdp/step_in_backward.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include <tessera/fsdp/gradients/gradient_taker.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/optim/steps/partial_steps.h>

namespace tessera {

namespace internal {

/// The parameters of one optimizer, and their steps.
class BackwardSteps final : public GradientTaker {
 public:
  BackwardSteps(torch::optim::Optimizer& optimizer, StepInBackwardOptions options)
      : steps_(optimizer), options_(std::move(options)) {}
  ~BackwardSteps() override {
    for (const auto& parameter : marked_) unmark_stepped_in_backward(parameter);
  }
  BackwardSteps(const BackwardSteps&) = delete;
  BackwardSteps& operator=(const BackwardSteps&) = delete;

  /// Marks the parameters of the optimizer. Those that `in_groups` has come with their groups.
  void mark(const torch::nn::Module& module, absl::flat_hash_set<const c10::TensorImpl*> in_groups) {
    in_groups_ = std::move(in_groups);
    absl::flat_hash_map<const c10::TensorImpl*, std::string> names;
    for (const auto& item : module.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
    for (const auto& group : steps_.optimizer().param_groups()) {
      for (const auto& parameter : group.params()) mark(parameter, names);
    }
  }

  void take(const std::vector<at::Tensor>& parameters, int64_t backward) override {
    std::vector<at::Tensor> own;
    const auto steps = [&](const at::Tensor& each) { return frees(each.unsafeGetTensorImpl()) && each.grad().defined(); };
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(own), steps);
    if (own.empty()) return;
    const at::NoGradGuard no_grad;
    if (options_.before_step) options_.before_step(own);
    steps_.step(own, backward);
    for (const auto& parameter : own) {
      parameter.mutable_grad() = at::Tensor();
      // An optimizer that writes `data()` counts no version, and autograd may have saved the parameter for a later formula.
      if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  bool frees(const c10::TensorImpl* parameter) const override { return known_.contains(parameter); }

 private:
  void mark(const at::Tensor& parameter, const absl::flat_hash_map<const c10::TensorImpl*, std::string>& names) {
    const auto* impl = parameter.unsafeGetTensorImpl();
    if (!known_.insert(impl).second) return;
    const auto name = names.find(impl);
    TORCH_CHECK_VALUE(name != names.end(), "step_in_backward: the optimizer has a parameter of shape ", parameter.sizes(),
                      ", which the module lacks: its backward does not step it");
    TORCH_CHECK_VALUE(!parameter.grad().defined(), "step_in_backward: ", name->second,
                      " has a gradient already: call zero_grad before");
    mark_stepped_in_backward(parameter, name->second, [this](const at::Tensor& landed) { take_alone(landed); });
    marked_.push_back(parameter);
  }

  /// The gradient of a parameter has come; with a group, its step comes after the group's last one.
  void take_alone(const at::Tensor& parameter) {
    if (!in_groups_.contains(parameter.unsafeGetTensorImpl())) take({parameter}, torch::autograd::get_current_graph_task_id());
  }

  PartialSteps steps_;
  const StepInBackwardOptions options_;
  absl::flat_hash_set<const c10::TensorImpl*> known_, in_groups_;
  std::vector<at::Tensor> marked_;
};

namespace {

absl::flat_hash_set<const c10::TensorImpl*> parameters_of(ShardedModule& state) {
  absl::flat_hash_set<const c10::TensorImpl*> all;
  for_each_group(state, /*recurse=*/false, [&](const GroupGradients& gradients) {
    for (const auto& parameter : gradients.group().parameters()) all.insert(parameter.tensor._unsafe_get_target());
  });
  return all;
}

} // namespace

} // namespace internal

StepInBackward::StepInBackward(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, StepInBackwardOptions options)
    : steps_(std::make_shared<internal::BackwardSteps>(optimizer, std::move(options))) {
  const auto states = internal::sharded_within(module, "step_in_backward");
  absl::flat_hash_set<const c10::TensorImpl*> in_groups;
  for (const auto& state : states) {
    TORCH_CHECK(state->schedule()->is_last_backward(), "step_in_backward: groups of ", state->label(),
                " would be stepped after set_is_last_backward(false): accumulate in no_sync");
    in_groups.merge(internal::parameters_of(*state));
  }
  steps_->mark(module, std::move(in_groups));
  for (const auto& state : states) {
    internal::for_each_group(*state, /*recurse=*/false, [&](auto& gradients) { gradients.settings.takers.push_back(steps_); });
    modules_.push_back(state);
  }
}

StepInBackward::StepInBackward(StepInBackward&&) noexcept = default;

StepInBackward::~StepInBackward() {
  for (const auto& module : modules_) {
    const auto state = module.lock();
    if (!state) continue;
    internal::for_each_group(*state, /*recurse=*/false, [&](auto& gradients) { std::erase(gradients.settings.takers, steps_); });
  }
}

StepInBackward step_in_backward(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                StepInBackwardOptions options) {
  return {module, optimizer, std::move(options)};
}

} // namespace tessera
