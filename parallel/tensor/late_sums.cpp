#include <tessera/parallel/tensor/late_sums.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <absl/container/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/parallel/tensor/style.h>

namespace tessera::internal::parallel {

namespace {

using torch::autograd::variable_list;

/// Sums that a backward has not reduced yet.
class LateSums {
 public:
  void add(const at::Tensor& parameter, const at::Tensor& gradient) {
    const std::lock_guard lock(mutex_);
    sums_.push_back({parameter, dtensor_meta(gradient)->local, styled_meta(parameter)->style->name->to_string()});
  }

  /// Reduces what lies on one mesh in one dtype together, and adds it to `grad()`. The same order on every rank, whatever order
  /// the gradients came in.
  void reduce() {
    const std::lock_guard lock(mutex_);
    std::sort(sums_.begin(), sums_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    while (!sums_.empty()) {
      const auto is_other = [&first = sums_.front()](const auto& sum) { return !first.reduces_with(sum); };
      const auto others = std::stable_partition(sums_.begin(), sums_.end(), [&](const auto& sum) { return !is_other(sum); });
      reduce_together({sums_.begin(), others});
      sums_.erase(sums_.begin(), others);
    }
  }

 private:
  struct Sum {
    at::Tensor parameter, local;
    std::string name;

    const DeviceMesh& mesh() const { return dtensor_meta(parameter)->spec->mesh(); }
    bool reduces_with(const Sum& other) const {
      return local.scalar_type() == other.local.scalar_type() && mesh() == other.mesh();
    }
  };

  static void reduce_together(const std::vector<Sum>& sums) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> flat;
    for (const auto& sum : sums) flat.push_back(sum.local.reshape(-1));
    const auto all = at::cat(flat);
    const auto label = "the gradients of " + sums.front().name + (sums.size() > 1 ? " and others" : "");
    sums.front().mesh().communicator()->all_reduce(all, ReduceOp::kSum, label).wait();
    int64_t offset = 0;
    for (const auto& sum : sums) {
      const auto& spec = dtensor_meta(sum.parameter)->spec;
      const auto own = all.narrow(0, offset, sum.local.numel()).view(spec->sizes());
      offset += sum.local.numel();
      sum.parameter.mutable_grad().add_(
          make_dtensor(own, Spec::intern(spec->mesh(), spec->placements(), spec->sizes(), own.scalar_type())));
    }
  }

  std::mutex mutex_;
  std::vector<Sum> sums_;
};

/// The sums of the backward that runs on this thread. Its callback owns them: they go with a backward that fails.
std::shared_ptr<LateSums> sums_of_backward() {
  static std::mutex mutex;
  static auto* const running = new absl::flat_hash_map<int, std::weak_ptr<LateSums>>;
  const std::lock_guard lock(mutex);
  auto& known = (*running)[torch::autograd::get_current_graph_task_id()];
  if (auto sums = known.lock()) return sums;
  auto sums = std::make_shared<LateSums>();
  known = sums;
  torch::autograd::Engine::get_default_engine().queue_callback([sums] { sums->reduce(); });
  absl::erase_if(*running, [](const auto& entry) { return entry.second.expired(); });
  return sums;
}

struct PlaceLate final : torch::autograd::FunctionPreHook {
  explicit PlaceLate(const at::Tensor& of) : parameter(of.getIntrusivePtr()) {}

  variable_list operator()(const variable_list& gradients) override {
    auto result = gradients;
    const at::Tensor owner(parameter.lock());
    const auto* meta = styled_meta(owner);
    if (!meta || !result[0].defined()) return result;
    const auto& spec = *meta->spec;
    // Some derivative formulas make zeros of their own: plain, and the same on every rank.
    if (!is_dtensor(result[0])) result[0] = from_local(result[0], spec.mesh(), {Replicate{}});
    const auto& given = *dtensor_meta(result[0])->spec;
    const bool is_sum = spec.is_replicated() && given.placements() == Placements{Partial{}} && given.mesh() == spec.mesh();
    if (!is_sum || !may_wait(owner)) {
      const DTensor gradient(result[0]);
      result[0] = given.mesh() == spec.mesh() ? gradient.redistribute(spec.placements())
                                              : gradient.redistribute(spec.mesh(), spec.placements());
    } else {
      sums_of_backward()->add(owner, result[0]);
      result[0] = make_dtensor(at::zeros(spec.sizes(), dtensor_meta(result[0])->local.options()), given.with({Replicate{}}));
    }
    return result;
  }

  /// Whether nobody looks at the gradient before the backward ends.
  static bool may_wait(const at::Tensor& owner) {
    const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
    if (at::GradMode::is_enabled() || (inputs && !inputs->empty())) return false;
    const auto& hooks = torch::autograd::impl::hooks(owner);
    const bool is_alone = hooks.size() == 1 && dynamic_cast<const PlaceLate*>(hooks[0].get());
    return is_alone && !torch::autograd::impl::post_acc_grad_hooks(owner);
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
};

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

bool places(const Hooks& hooks) {
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) { return dynamic_cast<const PlaceLate*>(hook.get()); });
}

} // namespace

void place_gradient_late(const at::Tensor& parameter) {
  // First of the tensor's hooks, and once more where the gradient is accumulated: a program's first hook drops those that are
  // there.
  auto& hooks = torch::autograd::impl::hooks(parameter);
  if (!places(hooks)) hooks.insert(hooks.begin(), std::make_unique<PlaceLate>(parameter));
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (node && !places(node->pre_hooks())) node->add_pre_hook(std::make_unique<PlaceLate>(parameter));
}

} // namespace tessera::internal::parallel
