#include <tessera/optim/parts/fused_lists.h>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

/// Returns the device of a parameter's memory.
c10::Device memory_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local.device() : tensor.device();
}

struct Key {
  c10::Device device;
  at::ScalarType dtype;
  size_t tensors;
  bool operator==(const Key&) const = default;
};

} // namespace

void for_each_fused_list(const std::vector<FusedEntry>& entries, const std::function<void(FusedLists&)>& step) {
  std::vector<std::pair<Key, std::vector<const FusedEntry*>>> groups;
  for (const auto& entry : entries) {
    const Key key{memory_of(entry.tensors[0]), entry.tensors[0].scalar_type(), entry.tensors.size()};
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == key; });
    auto& members = same != groups.end() ? same->second : groups.emplace_back(key, std::vector<const FusedEntry*>()).second;
    members.push_back(&entry);
  }
  for (const auto& [key, members] : groups) {
    FusedLists lists{std::vector<std::vector<at::Tensor>>(key.tensors), {}};
    std::map<int64_t, at::Tensor> steps; // parameters that have taken as many share one
    for (const auto* entry : members) {
      for (size_t k = 0; k < key.tensors; ++k) lists.tensors[k].push_back(entry->tensors[k]);
      auto& number = steps[entry->step];
      if (!number.defined()) number = at::full({}, entry->step, at::TensorOptions(at::kFloat).device(key.device));
      lists.steps.push_back(number);
    }
    step(lists);
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
