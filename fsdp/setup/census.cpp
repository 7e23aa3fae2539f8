#include <tessera/fsdp/setup/census.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <absl/container/inlined_vector.h>

#include <fmt/format.h>

#include <optional>
#include <utility>

#include <tessera/fsdp/buffers/memory_range.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

using torch::nn::Module;

namespace {

absl::flat_hash_set<const c10::TensorImpl*> addresses_of(const std::vector<at::Tensor>& ignored_params) {
  absl::flat_hash_set<const c10::TensorImpl*> addresses;
  for (size_t i = 0; i < ignored_params.size(); ++i) {
    TORCH_CHECK_VALUE(ignored_params[i].defined(), "fully_shard: number ", i, " of ignored_params is undefined");
    addresses.insert(ignored_params[i].unsafeGetTensorImpl());
  }
  return addresses;
}

/// The memory of this rank's part of a DTensor over other dims of the mesh, and of any other tensor that is not sharded.
std::optional<MemoryRange> range_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return MemoryRange::of(meta ? meta->local : tensor);
}

/// The storages of the parameters and buffers that are not sharded.
absl::flat_hash_set<const c10::StorageImpl*> free_storages(const Census& census) {
  absl::flat_hash_set<const c10::StorageImpl*> storages;
  for (const auto* items : {&census.free, &census.ignored, &census.buffers}) {
    for (const auto& [tensor, visit, key] : *items) {
      if (tensor.defined() && tensor.has_storage()) storages.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  return storages;
}

} // namespace

Census take_census(const std::vector<Module*>& modules, const std::vector<at::Tensor>& ignored_params) {
  const auto ignored = addresses_of(ignored_params);
  for (const auto* module : modules) follow_scripts(*module);
  Census census(modules);
  absl::flat_hash_set<const c10::TensorImpl*> seen; // tied ones come twice
  absl::flat_hash_set<const ShardedModule*> known;
  const ParameterGroup* last = nullptr; // parameters of one group mostly come together
  for (const auto& visit : census.walk.visits()) {
    for (const auto& item : Registry::parameters(*visit.module)) {
      const auto& parameter = item.value();
      if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const auto* meta = parameter_meta(parameter);
      const bool is_ignored = ignored.contains(parameter.unsafeGetTensorImpl());
      auto& list = is_ignored ? census.ignored : meta ? census.sharded : census.free;
      list.push_back({parameter, &visit, item.key()});
      TORCH_CHECK_VALUE(!is_ignored || !meta, "fully_shard: the parameter ", census.name_of(list.back()),
                        " is in ignored_params, but is sharded already: ignore it in the call that takes its module");
      if (!meta || meta->group == std::exchange(last, meta->group)) continue;
      auto root = state_of_group(*meta->group).root();
      if (known.insert(root.get()).second) census.roots.push_back(std::move(root));
    }
    for (const auto& item : visit.module->named_buffers(/*recurse=*/false)) {
      census.buffers.push_back({item.value(), &visit, item.key()});
    }
  }
  return census;
}

void check_own_memory(const Census& census) {
  absl::flat_hash_map<const c10::StorageImpl*, absl::InlinedVector<std::pair<MemoryRange, const Registered*>, 1>> parameters;
  const auto check = [&](const char* kind, const Registered& item, const std::optional<MemoryRange>& range) {
    if (!range) return;
    for (const auto& [other, parameter] : parameters[range->storage()]) {
      TORCH_CHECK_VALUE(!range->overlaps(other), "fully_shard: the ", kind, " ", census.name_of(item),
                        " shares memory with the parameter ", census.name_of(*parameter),
                        "; register one tensor under both names, or give each its own memory with clone()");
    }
  };
  const auto add = [&](const Registered& item, const std::optional<MemoryRange>& range) {
    check("parameter", item, range);
    if (range) parameters[range->storage()].emplace_back(*range, &item);
  };
  const auto free = free_storages(census); // those of one model were compared with each other when they were sharded
  for (const auto& item : census.sharded) {
    const auto* meta = parameter_meta(item.tensor);
    const auto& range = meta->group->parameters()[meta->index].origin.memory;
    if (range && (census.roots.size() > 1 || free.contains(range->storage()))) add(item, range);
  }
  for (const auto& item : census.free) add(item, range_of(item.tensor));
  for (const auto& item : census.ignored) check("ignored parameter", item, range_of(item.tensor));
  for (const auto& item : census.buffers) check("buffer", item, range_of(item.tensor));
}

std::string describe(const Census& census, const DeviceMesh& mesh) {
  std::string text;
  for (const auto& root : census.roots) {
    const auto* module = root->modules().front();
    if (!module || !census.walk.is_below(module)) continue;
    if (root->roles().mesh().rank_list() != mesh.rank_list())
      continue; // an expert: other ranks may have others, under other names
    text += fmt::format("\nthe module {} sharded, with values of checksum {}",
                        census.walk.name(census.walk.place_of(census.walk.visit_of(module))), root->initial_checksum);
  }
  for (const auto& item : census.ignored) text += fmt::format("\n{} ignored", census.name_of(item));
  return text;
}

} // namespace tessera::internal
