#include <tessera/optim/step.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/offload/borrowed_regions.h>
#include <tessera/offload/offload_memory.h>
#include <tessera/optim/optimizer_class.h>
#include <tessera/optim/parts/optimizer_ranks.h>
#include <tessera/optim/parts/own_values.h>

namespace tessera {

namespace internal {

namespace {

using torch::optim::Optimizer;

/// The region that a DTensor's part lies in; null for any other tensor.
const FileRegion* region_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !meta->local.defined() || !meta->local.has_storage()) return nullptr;
  return file_region(*meta->local.storage().unsafeGetStorageImpl());
}

/// The parameters whose shards lie in one file; with none, those of no file.
struct Unit {
  std::shared_ptr<FileMemory> file;
  std::vector<at::Tensor> parameters;
};

/// Whether the optimizer reduces what ranks have for themselves. Then it also steps what other ranks alone have a gradient of.
bool reduces_own_gradients(const OptimizerClass& kept) {
  return std::any_of(kept.tensors.begin(), kept.tensors.end(),
                     [](const auto& field) { return field.layout == StateLayout::kByRank; });
}

/// Lists the units in the order of the optimizer, each parameter once. Those of an optimizer that reduces are the same on all
/// ranks.
std::vector<Unit> units_of(Optimizer& optimizer) {
  const bool takes_all = reduces_own_gradients(class_of(optimizer));
  std::vector<Unit> units;
  absl::flat_hash_map<const FileMemory*, size_t> known;
  absl::flat_hash_set<const c10::TensorImpl*> listed;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const bool is_stepped = takes_all ? parameter.requires_grad() : parameter.grad().defined();
      if (!is_stepped || !listed.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const auto* region = region_of(parameter);
      const auto [found, is_new] = known.emplace(region ? region->file.get() : nullptr, units.size());
      if (is_new) units.push_back({region ? region->file : nullptr, {}});
      units[found->second].parameters.push_back(parameter);
    }
  }
  return units;
}

/// Gradients that are out of sight of the optimizer, until it dies.
class HiddenGradients {
 public:
  explicit HiddenGradients(const std::vector<Unit>& units) {
    for (const auto& unit : units) {
      for (const auto& parameter : unit.parameters) gradients_[parameter.unsafeGetTensorImpl()] = parameter;
    }
    for (auto& [impl, each] : gradients_) each.gradient = std::exchange(each.parameter.mutable_grad(), at::Tensor());
  }
  HiddenGradients(const HiddenGradients&) = delete;
  HiddenGradients& operator=(const HiddenGradients&) = delete;
  ~HiddenGradients() {
    for (auto& [impl, each] : gradients_) each.parameter.mutable_grad() = each.gradient;
  }
  const at::Tensor& of(const at::Tensor& parameter) const { return gradients_.at(parameter.unsafeGetTensorImpl()).gradient; }
  /// Those of one unit in their places for as long as it lives.
  class Shown {
   public:
    Shown(HiddenGradients& hidden, const Unit& unit) : hidden_(hidden), unit_(unit) {
      for (const auto& parameter : unit.parameters) parameter.mutable_grad() = hidden.of(parameter);
    }
    Shown(const Shown&) = delete;
    Shown& operator=(const Shown&) = delete;
    ~Shown() {
      for (const auto& parameter : unit_.parameters)
        hidden_.gradients_[parameter.unsafeGetTensorImpl()].gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
    }

   private:
    HiddenGradients& hidden_;
    const Unit& unit_;
  };

 private:
  struct Hidden {
    Hidden() = default;
    Hidden(at::Tensor of) : parameter(std::move(of)) {} // NOLINT(google-explicit-constructor)
    at::Tensor parameter, gradient;
  };
  absl::flat_hash_map<const c10::TensorImpl*, Hidden> gradients_;
};

/// Steps the units of an optimizer, one after another.
class StreamedStep {
 public:
  StreamedStep(Optimizer& optimizer, std::vector<Unit> units)
      : optimizer_(optimizer),
        class_(class_of(optimizer)),
        units_(std::move(units)),
        hidden_(units_),
        values_(optimizer, class_) {}

  void run() {
    std::string failure;
    for (const auto& unit : units_) {
      auto text = unit.file ? unit.file->delayed_failure().take() : std::string();
      if (failure.empty()) failure = std::move(text);
    }
    TORCH_CHECK(failure.empty(), failure);
    for (size_t i = 0; i < units_.size(); ++i) {
      if (i == 0) load(0);
      if (i + 1 < units_.size()) load(i + 1);
      step(i);
    }
    for (auto& slot : slots_) slot.regions.finish();
  }

 private:
  struct Slot {
    BorrowedRegions regions;
    std::vector<bool> is_gradient;
  };
  Slot& slot(size_t unit) { return slots_[unit % slots_.size()]; }

  template <typename Visit> // void(at::Tensor&) on the DTensor
  void for_each_state(const Unit& unit, const Visit& visit) {
    for (const auto& parameter : unit.parameters) {
      const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer_.state().end() || !found->second) continue;
      for (const auto& field : class_.tensors) {
        for (const auto& tensor : field.get(*found->second)) visit(tensor);
      }
    }
  }

  /// Starts to read what a unit's step needs.
  void load(size_t index) {
    const auto& unit = units_[index];
    auto& here = slot(index);
    here.regions.finish(); // what was written of the unit that was here
    std::vector<BorrowedRegions::StoragePtr> storages;
    absl::flat_hash_set<const c10::StorageImpl*> listed;
    here.is_gradient.clear();
    const auto add = [&](const at::Tensor& tensor, bool of_gradient) {
      if (!region_of(tensor)) return;
      auto storage = BorrowedRegions::StoragePtr::reclaim_copy(dtensor_meta(tensor)->local.storage().unsafeGetStorageImpl());
      if (!listed.insert(storage.get()).second) return;
      storages.push_back(std::move(storage));
      here.is_gradient.push_back(of_gradient);
    };
    for (const auto& parameter : unit.parameters) add(parameter, false);
    for_each_state(unit, [&](const at::Tensor& tensor) { add(tensor, false); });
    for (const auto& parameter : unit.parameters) add(hidden_.of(parameter), true);
    here.regions.load(std::move(storages));
  }

  void step(size_t index) {
    const auto& unit = units_[index];
    auto& [regions, is_gradient] = slot(index);
    if (index > 0) values_.put_back();
    regions.attach();
    const auto before = gradient_versions(unit);
    {
      const HiddenGradients::Shown shown(hidden_, unit);
      optimizer_.step();
    }
    const bool wrote_gradients = gradient_versions(unit) != before;
    regions.detach();
    std::vector<bool> is_written;
    for (const bool gradient : is_gradient) is_written.push_back(!gradient || wrote_gradients);
    regions.store(is_written);
    if (unit.file) move_new_state(unit);
  }

  /// The sum of versions tells of a write.
  uint64_t gradient_versions(const Unit& unit) const {
    uint64_t sum = 0;
    for (const auto& parameter : unit.parameters) {
      const auto* meta = dtensor_meta(hidden_.of(parameter));
      if (meta && meta->local.defined()) sum += meta->local._version();
    }
    return sum;
  }

  void move_new_state(const Unit& unit) {
    std::vector<DTensorMeta*> metas;
    std::vector<at::Tensor> locals;
    for_each_state(unit, [&](const at::Tensor& tensor) {
      auto* const meta = dtensor_meta(tensor);
      const bool moves = meta && !region_of(tensor) && meta->local.is_non_overlapping_and_dense() && meta->local.numel() > 0;
      if (!moves || std::find(metas.begin(), metas.end(), meta) != metas.end()) return;
      metas.push_back(meta);
      locals.push_back(meta->local);
    });
    if (metas.empty()) return;
    auto moved = move_to(*unit.file, locals);
    for (size_t i = 0; i < metas.size(); ++i) metas[i]->local = std::move(moved[i]);
    locals.clear();
    release_freed_memory();
  }

  Optimizer& optimizer_;
  const OptimizerClass& class_;
  const std::vector<Unit> units_;
  HiddenGradients hidden_;
  OwnValues values_;
  std::array<Slot, 3> slots_; ///< of the unit that computes, the one before and the one after it
};

bool lies_in_files(const Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (std::any_of(group.params().begin(), group.params().end(), [](const auto& each) { return region_of(each) != nullptr; }))
      return true;
  }
  return false;
}

/// Every rank of the optimizer's meshes calls it.
void step_in_files(Optimizer& optimizer) {
  const auto& kept = class_of(optimizer);
  TORCH_CHECK(!kept.flattens_parameters, "step: ", kept.name,
              " computes with all parameters together, so that its step cannot go from one group to the next: train without "
              "offload_to_files, or call optimizer.step(), which reads and writes the files through the page cache");
  std::exception_ptr own;
  std::string failure;
  try {
    StreamedStep(optimizer, units_of(optimizer)).run();
  } catch (const std::exception& error) {
    own = std::current_exception();
    failure = error_text(error);
  }
  const auto ranks = ranks_of(optimizer);
  if (ranks.size() == 1 && own) std::rethrow_exception(own);
  if (ranks.size() == 1) return;
  const auto communicator = process_context().communicator(ranks, at::kCPU, "optimizer step");
  throw_failures(failure, *communicator, at::kCPU, "the step of an optimizer");
}

} // namespace

} // namespace internal

at::Tensor step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  if (!internal::lies_in_files(optimizer)) return optimizer.step(closure);
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  internal::step_in_files(optimizer);
  return loss;
}

} // namespace tessera
