#pragma once

// Internal: meshes on which a plan of tensor parallelism says how activations lie.

#include <absl/algorithm/container.h>

#include <atomic>
#include <mutex>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera::internal::dispatch {

/// They stay planned for the life of the process. On such a mesh a plain tensor counts as Replicate. What an operator cannot take
/// as it lies is made whole, never split along another dim: a split of the batch, say, would spread from there, until the weights
/// would have to be gathered.
class PlannedMeshes {
 public:
  static PlannedMeshes& instance() {
    static auto* const all = new PlannedMeshes;
    return *all;
  }

  void add(const DeviceMesh& mesh) {
    const std::lock_guard lock(mutex_);
    if (absl::c_linear_search(meshes_, mesh)) return;
    meshes_.push_back(mesh);
    count_.store(meshes_.size(), std::memory_order_release);
  }

  bool contains(const DeviceMesh& mesh) {
    if (count() == 0) return false;
    const std::lock_guard lock(mutex_);
    return absl::c_linear_search(meshes_, mesh);
  }

  /// A plan that was made with fewer of them may be another one now.
  size_t count() const { return count_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::vector<DeviceMesh> meshes_;
  std::atomic<size_t> count_ = 0;
};

inline bool is_planned(const DeviceMesh& mesh) { return PlannedMeshes::instance().contains(mesh); }

} // namespace tessera::internal::dispatch
