#include <tessera/activations/placed_tensors.h>

#include <c10/util/Exception.h>

#include <optional>
#include <utility>
#include <vector>

#include <tessera/activations/version_watch.h>
#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

namespace {

class PlacedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PlacedHooks(std::shared_ptr<const TensorPlace> place) : place_(std::move(place)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    auto values = tensor.variable_data(); // the tensor of an output would keep the graph that keeps it
    // What is to be seen when it is read, as sharded parameters and views of them are, and what has no memory of its own.
    stays_ = values.key_set().has(kTouchKey) || !values.has_storage();
    watch_.emplace(tensor);
    if (!stays_) storage_ = values.storage().getWeakStorageImpl();
    options_ = values.options();
    sizes_ = values.sizes().vec();
    bring_back_ = stays_ ? [values] { return values; } : (*place_)(values);
    TORCH_CHECK_VALUE(bring_back_, "the place of saved tensors took ", values.toString(), " ", values.sizes(),
                      " and returned no function that brings it back");
  }

  at::Tensor call_unpack_hook() override {
    auto tensor = bring_back_();
    TORCH_CHECK(
        tensor.defined() && tensor.sizes() == c10::IntArrayRef(sizes_) && tensor.dtype() == options_.dtype() &&
            tensor.device() == options_.device(),
        "the place of saved tensors took ", options_.dtype(), " ", c10::IntArrayRef(sizes_), " on ", options_.device(),
        " and brought back ",
        tensor.defined() ? c10::str(tensor.dtype(), " ", tensor.sizes(), " on ", tensor.device()) : "an undefined tensor");
    const auto* storage = stays_ || !tensor.has_storage() ? nullptr : tensor.storage().unsafeGetStorageImpl();
    const bool is_original = stays_ || (storage != nullptr && storage_->lock().get() == storage);
    TORCH_CHECK(!is_original || !watch_->has_changed(), "a tensor that autograd saved, ", tensor.toString(), " ",
                c10::IntArrayRef(sizes_), ", was modified by an inplace operation");
    return tensor;
  }

 private:
  std::shared_ptr<const TensorPlace> place_;
  std::function<at::Tensor()> bring_back_;
  std::optional<VersionWatch> watch_;
  bool stays_ = false;
  /// Of the tensor: where the place copied nothing, a write to it is one to what was saved. Without its memory.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage_;
  at::TensorOptions options_;
  std::vector<int64_t> sizes_;
};

} // namespace

PlacedTensors::PlacedTensors(TensorPlace place) : place_(std::make_shared<const TensorPlace>(std::move(place))) {}

std::unique_ptr<torch::autograd::SavedVariableHooks> PlacedTensors::take() { return std::make_unique<PlacedHooks>(place_); }

} // namespace tessera::internal
