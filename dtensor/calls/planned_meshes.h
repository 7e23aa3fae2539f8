#pragma once

// Internal: meshes on which a plan of tensor parallelism says how activations lie.

#include <absl/algorithm/container.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
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
    add_locked(mesh);
  }

  /// `groups` has the ranks of the 1-D `line`, in its order, in rows: [groups, ranks of one].
  void add_groups(const DeviceMesh& groups, const DeviceMesh& line) {
    const std::lock_guard lock(mutex_);
    if (absl::c_linear_search(meshes_, groups)) return;
    lines_.emplace_back(groups, line);
    add_locked(groups);
    has_groups_.store(true, std::memory_order_release);
  }

  bool contains(const DeviceMesh& mesh) {
    if (count() == 0) return false;
    const std::lock_guard lock(mutex_);
    return absl::c_linear_search(meshes_, mesh);
  }

  /// Whether any mesh was added in groups.
  bool has_groups() const { return has_groups_.load(std::memory_order_acquire); }

  /// The line that `groups` has in rows; nothing for any other mesh.
  std::optional<DeviceMesh> line_of(const DeviceMesh& groups) {
    if (!has_groups() || groups.ndim() != 2) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto found = absl::c_find_if(lines_, [&](const auto& each) { return each.first == groups; });
    return found == lines_.end() ? std::nullopt : std::optional(found->second);
  }

  /// A plan that was made with fewer of them may be another one now.
  size_t count() const { return count_.load(std::memory_order_acquire); }

 private:
  void add_locked(const DeviceMesh& mesh) {
    if (absl::c_linear_search(meshes_, mesh)) return;
    meshes_.push_back(mesh);
    count_.store(meshes_.size(), std::memory_order_release);
  }

  std::mutex mutex_;
  std::vector<DeviceMesh> meshes_;
  std::vector<std::pair<DeviceMesh, DeviceMesh>> lines_; ///< groups, and their line
  std::atomic<size_t> count_ = 0;
  std::atomic<bool> has_groups_ = false;
};

inline bool is_planned(const DeviceMesh& mesh) { return PlannedMeshes::instance().contains(mesh); }

} // namespace tessera::internal::dispatch
