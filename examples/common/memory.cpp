#include "common/memory.h"

#include <tessera/checkpoint/state_dict.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <unistd.h>

#include <fstream>
#include <unordered_set>

namespace examples {
namespace {

// Counts every storage once, whole: padding included, shared storages not twice.
class StorageCounter {
 public:
  void add(const torch::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto local = tessera::is_dtensor(tensor) ? tessera::DTensor(tensor).local() : tensor;
    if (seen_.insert(local.storage().unsafeGetStorageImpl()).second) bytes_ += static_cast<int64_t>(local.storage().nbytes());
  }
  void add_bytes(int64_t bytes) { bytes_ += bytes; }
  int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
  int64_t bytes_ = 0;
};

} // namespace

int64_t parameter_count(const torch::nn::Module& model) {
  int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  return count;
}

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t state_bytes(const torch::nn::Module& model, torch::optim::Optimizer* optimizer) {
  StorageCounter counter;
  for (const auto& parameter : model.parameters()) {
    counter.add(parameter);
    counter.add(parameter.grad());
  }
  if (optimizer) {
    const auto state = tessera::state_dict(model, *optimizer);
    for (const auto& entry : state.entries()) {
      if (entry.is_tensor() && entry.name.starts_with("optimizer.")) counter.add(state.tensor(entry.name));
    }
  }
  const auto add_gathered = [&](const torch::nn::Module& module) {
    if (!tessera::is_sharded(module)) return;
    const auto handle = tessera::fsdp(module);
    counter.add_bytes(handle.unsharded_bytes() + handle.kept_bytes());
  };
  for (const auto& module : model.modules(/*include_self=*/false)) add_gathered(*module);
  add_gathered(model);
  return counter.bytes();
}

} // namespace examples
