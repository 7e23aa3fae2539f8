#include <tessera/parallel/tensor/gather_again.h>

#include <torch/csrc/autograd/engine.h>

#include <optional>
#include <utility>
#include <vector>

#include <tessera/activations/version_watch.h>
#include <tessera/base/per_thread.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/started_move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/in_backward.h>

namespace tessera::internal::parallel {

struct GatherAgain::Activation {
  at::Tensor source;                               ///< without history
  VersionWatch watch;                              ///< of the source
  c10::weak_intrusive_ptr<c10::StorageImpl> whole; ///< the memory of the gathered one
  int64_t numel;
  std::string label;

  /// Whether `tensor` is the whole in any shape.
  bool is_whole(const at::Tensor& tensor) const {
    const auto* meta = dtensor_meta(tensor);
    return meta && meta->local.has_storage() && meta->local.storage().unsafeGetStorageImpl() == whole._unsafe_get_target() &&
           meta->spec->is_replicated() && meta->spec->numel() == numel && meta->local.is_contiguous();
  }
};

namespace {

using Activation = GatherAgain::Activation;

/// The last activation that a backward gathered again, for q, k and v which keep one.
struct LastGathered {
  at::Tensor source, whole;
  std::optional<StartedMove> coming; ///< of the whole

  bool is_of(const Activation& activation) const {
    return source.defined() && dtensor_meta(source) == dtensor_meta(activation.source); // which copies share
  }
  const at::Tensor& come() {
    if (coming) whole = coming->finish();
    coming.reset();
    return whole;
  }
};
constinit PerThread<std::weak_ptr<LastGathered>> last_gathered; // a callback of the backward owns it

/// The backward's own, empty: the memory of what it had is let go before more is needed.
std::shared_ptr<LastGathered> empty_last() {
  auto last = last_gathered->lock();
  if (!last) {
    *last_gathered = last = std::make_shared<LastGathered>();
    torch::autograd::Engine::get_default_engine().queue_callback([last] {});
  }
  *last = {};
  return last;
}

at::Tensor gather(const Activation& activation) {
  if (const auto last = last_gathered->lock(); last && last->is_of(activation)) return last->come();
  if (!in_backward()) return move(activation.source, {Replicate{}}, activation.label.c_str()); // a program looks at a node
  const auto last = empty_last();
  auto whole = move(activation.source, {Replicate{}}, activation.label.c_str());
  *last = {activation.source, whole, std::nullopt};
  return whole;
}

class PartHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PartHooks(std::shared_ptr<const Activation> activation) : activation_(std::move(activation)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    is_gathered_ = activation_->is_whole(tensor);
    sizes_ = tensor.sizes().vec();
    if (!is_gathered_) kept_ = tensor.variable_data(); // the tensor of an output would keep the graph that keeps it
    watch_.emplace(tensor);
  }

  at::Tensor call_unpack_hook() override {
    const bool has_changed = watch_->has_changed() || (is_gathered_ && activation_->watch.has_changed());
    TORCH_CHECK(!has_changed, "a tensor that autograd saved, of shape ", c10::IntArrayRef(sizes_), ", for ", activation_->label,
                ", was modified by an inplace operation");
    if (!is_gathered_) return kept_;
    const at::NoGradGuard no_grad;
    return gather(*activation_).view(sizes_);
  }

 private:
  std::shared_ptr<const Activation> activation_;
  std::optional<VersionWatch> watch_;
  std::vector<int64_t> sizes_;
  at::Tensor kept_;
  bool is_gathered_ = false;
};

} // namespace

GatherAgain::GatherAgain(const at::Tensor& source, const at::Tensor& gathered, std::string label)
    : activation_(std::make_shared<const Activation>(Activation{source.variable_data(), VersionWatch(source),
                                                                dtensor_meta(gathered)->local.storage().getWeakStorageImpl(),
                                                                gathered.numel(), std::move(label)})) {}

void start_gathering_again(const GatherAgain::Activation& activation) {
  if (const auto last = last_gathered->lock(); last && last->is_of(activation)) return;
  const auto last = empty_last();
  last->coming.emplace(activation.source, Placements{Replicate{}}, activation.label);
  last->source = activation.source;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> GatherAgain::take() {
  if (other_) return other_->take();
  return std::make_unique<PartHooks>(activation_);
}

} // namespace tessera::internal::parallel
