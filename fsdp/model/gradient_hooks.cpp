#include <tessera/fsdp/model/gradient_hooks.h>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

namespace {

/// Of a parameter's leaves. Gradients of ops that read it as a DTensor, or of `to_local`, are DTensors.
class LeafHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  LeafHook(std::weak_ptr<ParameterGroup> group, size_t index) : group_(std::move(group)), index_(index) {}
  void operator()(const torch::autograd::Variable& leaf) override {
    at::Tensor gradient;
    std::swap(gradient, leaf.mutable_grad());
    const auto group = group_.lock();
    if (!group || !gradient.defined()) return;
    TORCH_CHECK(!gradient.requires_grad(), "backward(create_graph=true) reached the sharded parameter ", group->full_name(index_),
                ": its gradient is reduced over ranks and cannot be differentiated again. Take the gradient of the inputs with "
                "torch::autograd::grad(..., create_graph=true) and call backward() without create_graph on what is made of it");
    if (dtensor_meta(gradient)) return land_sharded(group, gradient);
    schedule_of(*group).land(*group, index_, gradient);
  }

 private:
  void land_sharded(const std::shared_ptr<ParameterGroup>& group, const at::Tensor& gradient) const {
    const auto& parameter = group->parameters()[index_];
    auto own = DTensor(gradient).redistribute(parameter.spec->placements()); // by all ranks, also where it was frozen since
    const at::Tensor tensor(parameter.tensor.lock());
    if (tensor.defined() && tensor.requires_grad()) schedule_of(*group).land_sharded({group, index_, std::move(own)});
  }

  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
};

/// Of the leaves of a group that `reshard_parameters` replaced.
class RetiredHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit RetiredHook(std::string name) : name_(std::move(name)) {}
  void operator()(const torch::autograd::Variable& leaf) override {
    leaf.mutable_grad() = at::Tensor();
    TORCH_CHECK(false, "the gradient of ", name_, " comes from a forward that ran before reshard_parameters: run it again");
  }

 private:
  std::string name_;
};

/// Refuses torch::autograd::grad over a sharded parameter, which would return the gradient of this rank's data alone.
class CaptureCheck final : public torch::autograd::FunctionPreHook {
 public:
  CaptureCheck(std::weak_ptr<ParameterGroup> group, size_t index, const torch::autograd::Node* accumulator)
      : group_(std::move(group)), index_(index), accumulator_(accumulator) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    // The engine puts what a hook returns in the place of what it gave: a copy would allocate for each gradient.
    if (C10_LIKELY(!tasks || tasks->empty())) return std::move(const_cast<torch::autograd::variable_list&>(gradients));
    const auto found = tasks->find(const_cast<torch::autograd::Node*>(accumulator_));
    const auto group = group_.lock();
    TORCH_CHECK(!group || found == tasks->end() || !found->second.captures_, "torch::autograd::grad over the sharded parameter ",
                group->full_name(index_),
                " would return a gradient of this rank's data alone; call backward() (with "
                "`inputs`, if only some gradients are wanted) and read parameter.grad()");
    return gradients;
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
  const torch::autograd::Node* accumulator_;
};

NodeReference redirect(const at::Tensor& parameter, const at::Tensor& leaf, const std::weak_ptr<ParameterGroup>& group,
                       size_t index) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<LeafHook>(group, index));
  if (!leaf.is_floating_point() && !leaf.is_complex()) return nullptr;
  const bool required = leaf.requires_grad();
  leaf.set_requires_grad(true);
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  leaf.set_requires_grad(required);
  torch::autograd::impl::add_hook(leaf, std::make_unique<CaptureCheck>(group, index, accumulator.get()));
  torch::autograd::impl::set_grad_accumulator(parameter, weak(accumulator));
  return accumulator;
}

} // namespace

void redirect_gradients(ParameterGroup& group) {
  auto& parameters = group.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters[i];
    if (!parameter.leaf.defined() || parameter.accumulator || parameter.tensor.expired()) continue;
    parameter.accumulator = redirect(at::Tensor(parameter.tensor.lock()), parameter.leaf, group.weak_from_this(), i);
  }
}

void retire_gradients(ParameterGroup& group) {
  for (size_t i = 0; i < group.parameters().size(); ++i) {
    for (const auto& leaf : {group.parameters()[i].leaf, group.parameters()[i].other_leaves.among_dtensors}) {
      if (leaf.defined()) torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<RetiredHook>(group.full_name(i)));
    }
  }
}

at::Tensor make_dtensor_leaf(const at::Tensor& parameter, const std::weak_ptr<ParameterGroup>& group, size_t index) {
  const auto* meta = parameter_meta(parameter);
  auto leaf = make_dtensor(meta->local, meta->spec);
  leaf.set_requires_grad(true);
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<LeafHook>(group, index));
  return leaf;
}

} // namespace tessera::internal
