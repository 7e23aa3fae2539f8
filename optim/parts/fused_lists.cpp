#include <tessera/optim/parts/fused_lists.h>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <utility>

#include <tessera/base/dispatch_keys.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

/// Returns the device of a parameter's memory.
c10::Device memory_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local.device() : tensor.device();
}

/// Whether the host alone works with the memory of a part. Then no stream has to be waited for before it is written.
bool is_on_host(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta && meta->local.defined() && meta->local.is_cpu() && meta->spec->mesh().device_type() == at::kCPU;
}

struct Key {
  bool is_dtensor; ///< plain tensors are apart: no operator takes both
  bool is_on_host; ///< as a DTensor
  c10::Device device;
  at::ScalarType dtype;
  size_t tensors;
  bool operator==(const Key&) const = default;
};

/// Whether a kernel that reads flat memory finds the elements of both in the same places.
bool lies_alike(const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto *meta = dtensor_meta(tensor), *own = dtensor_meta(parameter);
  return own ? meta && meta->spec == own->spec : tensor.strides() == parameter.strides();
}

/// The lists of one call, with copies in place of tensors that lie otherwise than their parameter.
class AlignedLists {
 public:
  explicit AlignedLists(size_t tensors) : lists_{std::vector<std::vector<at::Tensor>>(tensors), {}} {}

  void add(const FusedEntry& entry) {
    const auto parameter = flat(entry.tensors[0]);
    for (size_t k = 0; k < entry.tensors.size(); ++k) {
      auto tensor = k == 0 ? parameter : entry.tensors[k];
      if (!lies_alike(tensor, parameter)) tensor = at::empty_like(parameter).copy_(tensor);
      if (k != kGradient && !tensor.is_same(entry.tensors[k])) copies_.emplace_back(entry.tensors[k], tensor);
      lists_.tensors[k].push_back(std::move(tensor));
    }
  }
  void run(const std::function<void(FusedLists&)>& step) {
    step(lists_);
    for (auto& [tensor, copy] : copies_) tensor.copy_(copy);
  }
  std::vector<at::Tensor>& steps() { return lists_.steps; }

 private:
  static constexpr size_t kGradient = 1; ///< of an entry's tensors; no step writes it

  static at::Tensor flat(const at::Tensor& parameter) {
    const bool has_gaps = !dtensor_meta(parameter) && !parameter.is_non_overlapping_and_dense();
    return has_gaps ? parameter.detach().contiguous() : parameter;
  }

  FusedLists lists_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

} // namespace

void for_each_fused_list(const std::vector<FusedEntry>& entries, const std::function<void(FusedLists&)>& step) {
  std::vector<std::pair<Key, std::vector<const FusedEntry*>>> groups;
  for (const auto& entry : entries) {
    const Key key{is_dtensor(entry.tensors[0]), is_on_host(entry.tensors[0]), memory_of(entry.tensors[0]),
                  entry.tensors[0].scalar_type(), entry.tensors.size()};
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == key; });
    auto& members = same != groups.end() ? same->second : groups.emplace_back(key, std::vector<const FusedEntry*>()).second;
    members.push_back(&entry);
  }
  for (const auto& [key, members] : groups) {
    AlignedLists lists(key.tensors);
    std::map<int64_t, at::Tensor> steps; // parameters that have taken as many share one
    for (const auto* entry : members) {
      lists.add(*entry);
      auto& number = steps[entry->step];
      if (!number.defined()) number = at::full({}, entry->step, at::TensorOptions(at::kFloat).device(key.device));
      lists.steps().push_back(number);
    }
    // A step reads and writes parts alone. Whoever sees the reads of parameters would only take time for it.
    const c10::impl::ExcludeDispatchKeyGuard unseen(key.is_on_host ? c10::DispatchKeySet(kTouchKey) : c10::DispatchKeySet());
    lists.run(step);
  }
}

void fused_adam_step(const std::vector<FusedEntry>& entries, const FusedAdamSettings& settings) {
  for_each_fused_list(entries, [&](FusedLists& lists) {
    auto& tensors = lists.tensors;
    const auto most = settings.amsgrad ? tensors[4] : std::vector<at::Tensor>();
    const auto call = [&](const auto& fused) {
      fused(tensors[0], tensors[1], tensors[2], tensors[3], most, lists.steps, settings.lr, settings.beta1, settings.beta2,
            settings.weight_decay, settings.eps, settings.amsgrad);
    };
    if (settings.decoupled) {
      call([](const auto&... arguments) { at::_fused_adamw_(arguments..., false); });
    } else {
      call([](const auto&... arguments) { at::_fused_adam_(arguments..., false); });
    }
  });
}

} // namespace tessera::internal
