#include <tessera/fsdp/meta_init.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/gradient_hooks.h>
#include <tessera/nn/sync_batch_norm.h>

namespace tessera {

namespace {

/// This rank's part of a DTensor; any other tensor itself.
const at::Tensor& local_of(const at::Tensor& tensor) {
  const auto* meta = internal::dtensor_meta(tensor);
  return meta ? meta->local : tensor;
}

/// What tensor parallelism alone has split stays on the meta device: only a group gives parameters memory.
void check_sharded(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const auto* meta = internal::dtensor_meta(item.value());
    TORCH_CHECK_VALUE(
        !meta || internal::parameter_meta(item.value()) || !meta->local.is_meta() || meta->spec->mesh().device().is_meta(),
        "tessera::materialize: the parameter ", item.key(),
        " is a DTensor already and not sharded: call fully_shard before, also on a mesh of one rank");
  }
}

/// What a tensor was given, before anything wrote it.
struct Memory {
  explicit Memory(const at::Tensor& tensor)
      : storage(local_of(tensor).storage().getWeakStorageImpl()),
        data(local_of(tensor).const_data_ptr()),
        version(local_of(tensor)._version()),
        read_version(tensor._version()) {}
  bool is_of(const at::Tensor& tensor) const {
    const auto& local = local_of(tensor);
    return local.has_storage() && local.storage().unsafeGetStorageImpl() == storage._unsafe_get_target() &&
           local.const_data_ptr() == data;
  }
  bool was_written(const at::Tensor& tensor) const {
    return !is_of(tensor) || local_of(tensor)._version() != version || tensor._version() != read_version;
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  int64_t version;
  int64_t read_version; ///< of what stands for a parameter where it is read: it may lie in this rank's part
};

/// A tensor of a module, or of a group of its parameters, that has no values yet.
struct Fresh {
  bool was_written() const { return local_of(tensor).numel() == 0 || memory->was_written(tensor); }

  std::string name;
  at::Tensor tensor;
  std::optional<Memory> memory; ///< none yet where it is on the meta device
};

/// What calls gave memory, and an `init` did not write that threw.
struct Unwritten {
  std::mutex mutex;
  std::vector<Memory> left; ///< guarded by mutex
};
Unwritten& unwritten() {
  static Unwritten all;
  return all;
}

std::optional<Memory> memory_left_to(const at::Tensor& tensor) {
  auto& all = unwritten();
  const std::lock_guard lock(all.mutex);
  for (const auto& each : all.left) {
    if (!each.storage.expired() && each.is_of(tensor)) return each;
  }
  return std::nullopt;
}

/// Those that `init` wrote, or of which the caller learns that it did not, need nobody to remember them.
void remember(const std::vector<Fresh>& all, bool has_failed) {
  auto& known = unwritten();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.left, [&](const Memory& each) {
    return each.storage.expired() ||
           std::any_of(all.begin(), all.end(), [&](const Fresh& one) { return each.is_of(one.tensor); });
  });
  for (const auto& one : all) {
    if (has_failed && !one.was_written()) known.left.push_back(*one.memory);
  }
}

std::vector<Fresh> tensors_without_values(const torch::nn::Module& module) {
  std::vector<Fresh> fresh;
  std::unordered_set<const void*> seen;
  const auto visit = [&](std::string name, const at::Tensor& tensor) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    auto memory = memory_left_to(tensor);
    if (memory || local_of(tensor).is_meta()) fresh.push_back({std::move(name), tensor, std::move(memory)});
  };
  for (const auto& item : module.named_parameters()) visit(item.key(), item.value());
  for (const auto& item : module.named_buffers()) visit(item.key(), item.value());
  for (const auto& parameter : module.parameters()) { // a group gets memory as a whole
    const auto* meta = internal::parameter_meta(parameter);
    if (!meta || !seen.insert(meta->group).second) continue;
    const auto& members = meta->group->parameters();
    for (size_t i = 0; i < members.size(); ++i) visit(meta->group->full_name(i), at::Tensor(members[i].tensor.lock()));
  }
  return fresh;
}

void give_memory(const torch::nn::Module& module) {
  c10::Device device(c10::kCPU);
  for (const auto& parameter : module.parameters()) {
    if (const auto* meta = internal::parameter_meta(parameter)) {
      auto& group = *meta->group; // which gives its parameters other metas
      device = group.roles().mesh().device();
      group.materialize();
      internal::redirect_gradients(group);
    }
  }
  const auto allocate = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta() || device.is_meta()) return;
    if (const auto* meta = internal::dtensor_meta(tensor)) // a buffer that tensor parallelism has replicated
      return internal::become_dtensor(
          tensor, c10::make_intrusive<internal::DTensorMeta>(at::empty_like(meta->local, at::TensorOptions(device)), meta->spec));
    // set_data refuses the step from the meta device to another one.
    const auto allocated = at::empty_like(tensor, at::TensorOptions(device));
    internal::keep_synchronized(tensor, allocated);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(allocated.getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) allocate(parameter);
  for (const auto& buffer : module.buffers()) allocate(buffer);
}

/// What a module does to one below it comes after what that does to itself.
void apply_bottom_up(torch::nn::Module& top, const std::function<void(torch::nn::Module&)>& function) {
  std::unordered_set<const torch::nn::Module*> seen;
  const std::function<void(torch::nn::Module&)> apply = [&](torch::nn::Module& module) {
    if (!seen.insert(&module).second) return;
    for (const auto& child : module.children()) apply(*child);
    function(module);
  };
  apply(top);
}

} // namespace

std::vector<std::string> materialize(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init) {
  TORCH_CHECK_VALUE(init, "tessera::materialize: init is an empty function");
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(),
                    "tessera::materialize: called in InferenceMode, whose tensors cannot be trained; call it outside");
  check_sharded(module);
  const at::NoGradGuard no_grad;
  auto fresh = tensors_without_values(module);
  give_memory(module);
  for (auto& one : fresh) {
    if (!one.memory) one.memory.emplace(one.tensor);
  }
  try {
    apply_bottom_up(module, init);
  } catch (...) {
    remember(fresh, /*has_failed=*/true);
    throw;
  }
  remember(fresh, /*has_failed=*/false);
  std::vector<std::string> unwritten;
  for (const auto& one : fresh) {
    if (!one.was_written()) unwritten.push_back(one.name);
  }
  return unwritten;
}

} // namespace tessera
