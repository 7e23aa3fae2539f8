#include <tessera/optim/parts/fused_lists.h>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/count_write.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/prefetch.h>

namespace tessera::internal {

namespace {

/// Returns the device of a parameter's memory.
c10::Device memory_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local.device() : tensor.device();
}

/// Whether a kernel that reads flat memory finds the elements of both in the same places.
bool lies_alike(const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto *meta = dtensor_meta(tensor), *own = dtensor_meta(parameter);
  return own ? meta && meta->spec == own->spec : tensor.strides() == parameter.strides();
}

/// What a call takes of an entry. No operator takes plain tensors beside DTensors.
enum class Taken { kPlain, kDTensors, kParts };

/// Whether a step of an entry's DTensors is one of their parts, in memory that the host alone works with: no stream has to be
/// waited for before it is written, and whoever sees the reads of parameters would only take time for it.
bool steps_on_parts(const FusedEntry& entry) {
  const auto* own = dtensor_meta(entry.tensors[0]);
  const auto& spec = *own->spec;
  if (!own->local.is_cpu() || spec.mesh().device_type() != at::kCPU || spec.has_partial() || !spec.on_mesh()) return false;
  return std::all_of(entry.tensors.begin(), entry.tensors.end(), [&](const at::Tensor& tensor) {
    const auto* meta = dtensor_meta(tensor);
    return meta && meta->spec == own->spec && !meta->copied_at_version && meta->local.strides() == own->local.strides();
  });
}

Taken taken_of(const FusedEntry& entry) {
  if (!is_dtensor(entry.tensors[0])) return Taken::kPlain;
  return steps_on_parts(entry) ? Taken::kParts : Taken::kDTensors;
}

struct Key {
  Taken taken;
  c10::Device device;
  at::ScalarType dtype;
  size_t tensors;
  bool operator==(const Key&) const = default;
};

constexpr size_t kGradient = 1; ///< of an entry's tensors; no step writes it

/// The lists of one call, with copies in place of tensors that lie otherwise than their parameter.
class AlignedLists {
 public:
  AlignedLists(size_t tensors, size_t entries) : lists_{std::vector<std::vector<at::Tensor>>(tensors), {}} {
    for (auto& list : lists_.tensors) list.reserve(entries);
    lists_.steps.reserve(entries);
  }

  void add(const FusedEntry& entry) {
    const auto parameter = flat(entry.tensors[0]);
    for (size_t k = 0; k < entry.tensors.size(); ++k) {
      auto tensor = k == 0 ? parameter : entry.tensors[k];
      if (!lies_alike(tensor, parameter)) tensor = at::empty_like(parameter).copy_(tensor);
      if (k != kGradient && !tensor.is_same(entry.tensors[k])) copies_.emplace_back(entry.tensors[k], tensor);
      lists_.tensors[k].push_back(std::move(tensor));
    }
  }
  void add_parts(const FusedEntry& entry) {
    for (size_t k = 0; k < entry.tensors.size(); ++k) lists_.tensors[k].push_back(dtensor_meta(entry.tensors[k])->local);
  }
  void run(const std::function<void(FusedLists&)>& step) {
    step(lists_);
    for (auto& [tensor, copy] : copies_) tensor.copy_(copy);
  }
  std::vector<at::Tensor>& steps() { return lists_.steps; }

 private:
  static at::Tensor flat(const at::Tensor& parameter) {
    const bool has_gaps = !dtensor_meta(parameter) && !parameter.is_non_overlapping_and_dense();
    return has_gaps ? parameter.detach().contiguous() : parameter;
  }

  FusedLists lists_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

/// Prefetches what `steps_on_parts` reads a few positions later: the step before has left other data in the caches.
void prefetch_ahead(const std::vector<FusedEntry>& entries, size_t position) {
  constexpr size_t kAhead = 4;
  if (position + 2 * kAhead < entries.size()) {
    for (const auto& tensor : entries[position + 2 * kAhead].tensors) prefetch(dtensor_meta(tensor));
  }
  if (position + kAhead >= entries.size()) return;
  for (const auto& tensor : entries[position + kAhead].tensors) {
    const auto* meta = dtensor_meta(tensor);
    if (meta) prefetch(meta->local.unsafeGetTensorImpl());
  }
}

/// Entries of one call.
struct Members {
  Key key;
  std::vector<const FusedEntry*> entries;
};

/// The kernels count no write. What autograd has saved of a plain parameter must not be taken for what it was, either.
void count_writes(const FusedEntry& entry) {
  for (size_t k = 0; k < entry.tensors.size(); ++k) {
    const auto& written = entry.tensors[k];
    if (k == kGradient) continue;
    if (is_dtensor(written))
      count_write(written);
    else if (!written.is_inference())
      written.unsafeGetTensorImpl()->bump_version();
  }
}

void run(const Members& members, const std::function<void(FusedLists&)>& step) {
  const bool of_parts = members.key.taken == Taken::kParts;
  AlignedLists lists(members.key.tensors, members.entries.size());
  std::map<int64_t, at::Tensor> steps; // parameters that have taken as many share one
  for (const auto* entry : members.entries) {
    of_parts ? lists.add_parts(*entry) : lists.add(*entry);
    auto& number = steps[entry->step];
    if (!number.defined()) number = at::full({}, entry->step, at::TensorOptions(at::kFloat).device(members.key.device));
    lists.steps().push_back(number);
  }
  if (members.key.taken == Taken::kDTensors) return lists.run(step); // which counts
  {
    const auto hidden = of_parts ? c10::autograd_dispatch_keyset_with_ADInplaceOrView : c10::DispatchKeySet();
    const c10::impl::ExcludeDispatchKeyGuard below(hidden);
    lists.run(step);
  }
  for (const auto* entry : members.entries) count_writes(*entry);
}

} // namespace

void for_each_fused_list(const std::vector<FusedEntry>& entries, const std::function<void(FusedLists&)>& step) {
  std::vector<Members> groups;
  for (size_t i = 0; i < entries.size(); ++i) {
    prefetch_ahead(entries, i);
    const auto& entry = entries[i];
    const Key key{taken_of(entry), memory_of(entry.tensors[0]), entry.tensors[0].scalar_type(), entry.tensors.size()};
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.key == key; });
    auto& members = same != groups.end() ? *same : groups.emplace_back(Members{key, {}});
    members.entries.push_back(&entry);
  }
  for (const auto& members : groups) run(members, step);
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
