#include <tessera/optim/steps/partial_steps.h>

#include <c10/util/Exception.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <tessera/optim/step.h>

namespace tessera::internal {

namespace {

using torch::optim::Optimizer;

/// An optimizer that knows of some of its parameters alone, until this dies.
class Restricted {
 public:
  Restricted(Optimizer& optimizer, const std::vector<at::Tensor>& parameters) : optimizer_(optimizer) {
    absl::flat_hash_set<const c10::TensorImpl*> known;
    for (const auto& parameter : parameters) known.insert(parameter.unsafeGetTensorImpl());
    const auto is_known = [&](const auto& each) { return known.contains(each.unsafeGetTensorImpl()); };
    for (auto& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> kept;
      std::copy_if(group.params().begin(), group.params().end(), std::back_inserter(kept), is_known);
      all_.push_back(std::exchange(group.params(), std::move(kept)));
    }
  }
  Restricted(const Restricted&) = delete;
  Restricted& operator=(const Restricted&) = delete;
  ~Restricted() {
    for (size_t i = 0; i < all_.size(); ++i) optimizer_.param_groups()[i].params() = std::move(all_[i]);
  }

 private:
  Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> all_;
};

} // namespace

PartialSteps::PartialSteps(Optimizer& optimizer) : optimizer_(optimizer), class_(class_of(optimizer)) {
  TORCH_CHECK(!class_.flattens_parameters, "step_in_backward: ", class_.name,
              " computes with all parameters together, so that it cannot step a group before the others have their gradients");
}

void PartialSteps::step(const std::vector<at::Tensor>& parameters, int64_t round) {
  const Restricted restricted(optimizer_, parameters);
  if (std::exchange(round_, round) == round) {
    before_->put_back();
  } else {
    before_.emplace(optimizer_, class_);
  }
  tessera::step(optimizer_);
}

} // namespace tessera::internal
