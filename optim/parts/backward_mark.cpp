#include <tessera/optim/parts/backward_mark.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

using Hook = torch::autograd::PostAccumulateGradHook;

std::atomic<int64_t> marks = 0;

class BackwardMark final : public Hook {
 public:
  BackwardMark(std::string name, std::function<void(const at::Tensor&)> landed, std::unique_ptr<Hook> before)
      : name_(std::move(name)), landed_(std::move(landed)), before_(std::move(before)) {
    ++marks;
  }
  ~BackwardMark() override { --marks; }
  BackwardMark(const BackwardMark&) = delete;
  BackwardMark& operator=(const BackwardMark&) = delete;
  void operator()(const torch::autograd::Variable& parameter) override {
    if (before_) (*before_)(parameter);
    landed_(parameter);
  }
  const std::string& name() const { return name_; }
  std::unique_ptr<Hook> take_before() { return std::move(before_); }

 private:
  std::string name_;
  std::function<void(const at::Tensor&)> landed_;
  std::unique_ptr<Hook> before_;
};

BackwardMark* mark_of(const at::Tensor& parameter) {
  if (!torch::autograd::impl::get_autograd_meta(parameter)) return nullptr; // a frozen one that autograd has never met
  return dynamic_cast<BackwardMark*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

/// Takes the hook of the parameter away.
std::unique_ptr<Hook> take_hook(const at::Tensor& parameter) {
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  return hook ? std::move(hook) : nullptr;
}

} // namespace

void mark_stepped_in_backward(const at::Tensor& parameter, std::string name, std::function<void(const at::Tensor&)> landed) {
  TORCH_CHECK(!mark_of(parameter), "step_in_backward: another optimizer steps ", name, " in its backward already");
  auto before = take_hook(parameter);
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<BackwardMark>(std::move(name), std::move(landed), std::move(before)));
}

void unmark_stepped_in_backward(const at::Tensor& parameter) {
  auto* const mark = mark_of(parameter);
  if (mark) torch::autograd::impl::set_post_acc_grad_hooks(parameter, mark->take_before());
}

bool is_any_stepped_in_backward() { return marks > 0; }
bool is_stepped_in_backward(const at::Tensor& parameter) { return mark_of(parameter) != nullptr; }

void check_not_stepped_in_backward(const std::vector<at::Tensor>& parameters, const char* what) {
  for (const auto& parameter : parameters) {
    const auto* const mark = parameter.defined() ? mark_of(parameter) : nullptr;
    TORCH_CHECK(!mark, what, ", but ", mark->name(),
                " is stepped in its backward (step_in_backward), after which its gradient is gone: limit gradients in "
                "StepInBackwardOptions::before_step, or take steps after the backward");
  }
}

} // namespace tessera::internal
